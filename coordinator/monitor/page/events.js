// What happened: the latest, those of an hour, those with some words; older ones page by page.
const HOUR = 3600, EVENTS = 100;
const asked = { search: "", after: null, before: null };
let listed = [], older = null, upTo = null; // `upTo`: seconds, while looking back

const eventLine = event => element("li", {},
  element("time", { datetime: dateOf(event.at).toISOString() }, moment(event.at)),
  event.node ? element("a", { href: `#/node/${encodeURIComponent(event.node)}` }, event.node) : null,
  `${event.node ? " " : ""}${event.sentence}`);
const eventKey = event => `${event.at} ${event.sentence}`;

async function loadEvents(more = false) {
  const before = more ? older : asked.before ?? upTo;
  const said = await ask("events", { search: asked.search, after: asked.after, before, limit: EVENTS });
  listed = more ? [...listed, ...said.events] : said.events;
  older = said.before;
  if (more) byId("events").append(...said.events.map(eventLine));
  else byId("events").replaceChildren(...listed.map(eventLine));
  byId("events-older").hidden = older == null;
  const found = listed.length ? "" : older == null ? "No such event." : "None among the latest; older ones may be.";
  if (asked.after == null) text(byId("events-says"), found);
  else text(byId("events-says"), `${moment(asked.after)} to ${clock(asked.before)}: ${plural(listed.length, "event")}${older == null ? "" : " and more"}. ${await hourStory()}`);
}

// The rounds of the hour that is looked at.
async function hourStory() {
  const said = await ask("series", { x: "time", names: "train_loss", from: asked.after, to: asked.before, points: 100 });
  const inside = said.at.map((at, i) => [at, i]).filter(([at]) => at >= asked.after && at <= asked.before).map(([, i]) => i);
  if (!inside.length) return "No round was committed.";
  const [a, b] = [inside[0], inside[inside.length - 1]], loss = said.series.train_loss;
  return `${plural(said.inside, "round")} committed, ${count(said.round[a])} to ${count(said.round[b])}; train loss ${digits(loss[a])} to ${digits(loss[b])}.`;
}

function addEvents(events) { // of a living run, the latest last
  if (asked.search || asked.after != null || upTo != null) return;
  const known = new Set(listed.slice(0, 200).map(eventKey));
  const fresh = events.filter(event => !known.has(eventKey(event)) && (!listed.length || event.at >= listed[0].at));
  if (!fresh.length) return;
  fresh.reverse();
  listed = [...fresh, ...listed].slice(0, 2000);
  byId("events").prepend(...fresh.map(eventLine));
}

const failed = place => error => text(byId(place), error.message);
const reloadEvents = () => loadEvents().catch(failed("events-says"));

function showHour(at) {
  if (!Number.isFinite(at)) return;
  const start = Math.floor(at / HOUR) * HOUR;
  Object.assign(asked, { after: start, before: start + HOUR });
  byId("events-hour").value = hourField(start);
  reloadEvents();
}
const hourNow = () => asked.after ?? (current.run ? current.run.now : Date.now() / 1000);
byId("events-search").addEventListener("input", settled(() => { asked.search = byId("events-search").value.trim(); reloadEvents(); }, 250));
byId("events-hour").addEventListener("change", () => showHour(new Date(byId("events-hour").value).getTime() / 1000));
byId("hour-before").addEventListener("click", () => showHour(hourNow() - HOUR));
byId("hour-after").addEventListener("click", () => showHour(hourNow() + HOUR));
byId("events-latest").addEventListener("click", () => { Object.assign(asked, { after: null, before: null }); byId("events-hour").value = ""; reloadEvents(); });
byId("events-older").addEventListener("click", () => loadEvents(true).catch(failed("events-says")));
