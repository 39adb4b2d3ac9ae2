// What happened: the latest, those of an hour, those with some words; older ones page by page.
const HOUR = 3600, EVENTS = 100;
const asked = { search: "", after: null, before: null, routine: false }; // routine: that a round closes
let listed = [], older = null, upTo = null; // `upTo`: seconds, while looking back

const eventLine = event => element("li", {}, hourButton(event.at), " ", ...eventWords(event));

// A time that leads to the events of its hour.
const hourButton = at => element("button", { type: "button", class: "when", title: "What happened in this hour", onclick: () => visitHour(at) },
  element("time", { datetime: dateOf(at).toISOString() }, moment(at)));

// The sentence, in which the name of the node that it is about leads to the node; where it is not in it, before it.
function eventWords({ node, name, sentence: words }) {
  if (!node) return [words];
  const known = name || nameOf(node), link = element("a", { href: `#/node/${encodeURIComponent(node)}` }, known);
  const at = wordAt(words, known);
  return at < 0 ? [link, ` ${words}`] : [words.slice(0, at), link, words.slice(at + known.length)];
}
function wordAt(words, name) { // -1: it is not there, or only as a part of another word
  const inWord = character => /[\p{L}\p{N}_-]/u.test(character ?? "");
  for (let at = words.indexOf(name); at >= 0; at = words.indexOf(name, at + 1))
    if (!inWord(words[at - 1]) && !inWord(words[at + name.length])) return at;
  return -1;
}
const nameOf = node => { const member = current.run && current.run.members.find(m => m.node_id === node); return member ? member.name : node; };
const eventKey = event => `${event.at} ${event.sentence}`;

async function loadEvents(more = false) {
  const end = asked.before == null ? upTo : Math.min(asked.before, upTo ?? Infinity);
  const before = more ? older : end;
  const said = await ask("events", { search: asked.search, after: asked.after, before, limit: EVENTS, routine: asked.routine ? 1 : null });
  listed = more ? [...listed, ...said.events] : said.events;
  older = said.before;
  if (more) byId("events").append(...said.events.map(eventLine));
  else byId("events").replaceChildren(...listed.map(eventLine));
  byId("events-older").hidden = older == null;
  const found = listed.length ? "" : older == null ? "No such event." : "None among the latest; older ones may be.";
  if (asked.after == null) text(byId("events-says"), found);
  else if (end <= asked.after) text(byId("events-says"), `${moment(asked.after)} is after round ${count(current.at)}, as of which the run is shown.`);
  else text(byId("events-says"), `${moment(asked.after)} to ${clock(end)}: ${plural(listed.length, "event")}${older == null ? "" : " and more"}. ${hourStory(more ? hour : hour = said.period, end)}`);
}

// The rounds of the hour that is looked at; of one outside the run, where the run is.
let hour = null;
function hourStory(period, end) {
  if (!period) return "No round was committed.";
  const { committed, rounds, train_loss: loss } = period;
  const words = rounds ? [`${plural(committed, "round")} committed, ${count(rounds[0])}${committed > 1 ? ` to ${count(rounds[1])}` : ""}`] : ["No round was committed"];
  if (period.void) words[0] += `, and ${count(period.void)} void`;
  if (loss) words.push(`train loss ${digits(loss[0])}${committed > 1 ? ` to ${digits(loss[1])}` : ""}`);
  const outside = end <= period.began ? ` The run began later: its first round was committed on ${moment(period.began)}.`
    : asked.after > period.ended ? ` ${current.live ? "The latest round" : "The run ended before: its last round"} was committed on ${moment(period.ended)}.` : "";
  return `${words.join("; ")}.${outside}`;
}

function addEvents(events) { // of a living run, the latest last
  if (asked.search || asked.after != null || upTo != null) return;
  const known = new Set(listed.slice(0, 200).map(eventKey));
  const fresh = events.filter(event => (asked.routine || !event.routine) && !known.has(eventKey(event)) && (!listed.length || event.at >= listed[0].at));
  if (!fresh.length) return;
  fresh.reverse();
  listed = [...fresh, ...listed].slice(0, 2000);
  byId("events").prepend(...fresh.map(eventLine));
}

const failed = place => error => text(byId(place), error.message);
const reloadEvents = () => loadEvents().catch(failed("events-says"));

function showHour(at) {
  if (!Number.isFinite(at)) return;
  const start = Math.floor(at / 60) * 60; // as the field has it
  Object.assign(asked, { after: start, before: start + HOUR });
  byId("events-hour").value = minuteField(start);
  reloadEvents();
}
function showLast(seconds) { // of the run as it is shown
  const end = current.run ? current.run.now : Date.now() / 1000;
  Object.assign(asked, { after: end - seconds, before: end + 0.001 });
  byId("events-hour").value = "";
  reloadEvents();
}
function visitHour(at) {
  leaveView();
  showHour(hourOf(at));
  byId("events-title").focus();
}
const hourOf = at => Math.floor(at / HOUR) * HOUR;
const hourNow = () => asked.after ?? hourOf(current.run ? current.run.now : Date.now() / 1000);
byId("events-search").addEventListener("input", settled(() => { asked.search = byId("events-search").value.trim(); reloadEvents(); }, 250));
byId("events-routine").addEventListener("change", () => { asked.routine = byId("events-routine").checked; reloadEvents(); });
byId("events-hour").addEventListener("change", () => showHour(new Date(byId("events-hour").value).getTime() / 1000));
byId("hour-before").addEventListener("click", () => showHour(hourNow() - HOUR));
byId("hour-after").addEventListener("click", () => showHour(hourNow() + HOUR));
byId("last-minutes").addEventListener("click", () => showLast(600));
byId("events-latest").addEventListener("click", () => { Object.assign(asked, { after: null, before: null }); byId("events-hour").value = ""; reloadEvents(); });
byId("events-older").addEventListener("click", () => loadEvents(true).catch(failed("events-says")));
