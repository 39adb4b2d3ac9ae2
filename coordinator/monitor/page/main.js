// The page: what it follows, and which view is open. The address behind # says which:
//   #/          the run        #/at/K      the run as of round K
//   #/node/ID   a node         #/round/K   a round
// `run` is what is shown, `newest` the latest of a living run, `at` the round that is looked back at (null: now),
// `over`: nobody answers any more.
const current = { run: null, newest: null, at: null, live: true, over: false, looking: false };
const zoom = { min: null, max: null };
const chart = new Chart(byId("chart"), byId("chart-says"), {
  pick: index => { location.hash = `#/round/${chart.data.round[index]}`; },
  zoomed: ({ min, max }) => {
    const [first, last] = chart.span || [min, max], everything = min <= first && max >= last;
    Object.assign(zoom, everything ? { min: null, max: null } : { min, max });
    refine();
  },
});
chart.hint = "Drag to zoom, click a point for its round. With the keyboard: arrows move, plus and minus zoom, 0 shows all, Enter opens the round.";
for (const [value, { label }] of Object.entries(KINDS)) byId("chart-kind").append(element("option", { value }, label));

let drawing = 0;
async function drawChart() {
  const mine = ++drawing, kind = KINDS[byId("chart-kind").value], axis = byId("chart-axis").value;
  const points = Math.min(Math.max(byId("chart").clientWidth, 400), 2000);
  const said = await ask("series", { x: axis, names: Object.keys(kind.curves).join(","), from: zoom.min, to: zoom.max, points });
  if (mine !== drawing) return; // another answer is asked for meanwhile
  chart.span = said.span;
  chart.marks = said.marks;
  chart.at = current.at == null ? null : placeOf(said, axis);
  chart.show(
    { x: said.x, rows: said.series, round: said.round, describe: i => `Round ${count(said.round[i])}, ${moment(said.at[i])}` },
    { curves: kind.curves, say: kind.say, tick: kind.tick || (value => kind === KINDS.loss ? String(+value.toFixed(4)) : short(value)), time: axis === "time", axis, zero: kind !== KINDS.loss, clip: kind.clip, incrs: kind.incrs },
    zoom.min == null ? (said.span && said.span[1] > said.span[0] ? { min: said.span[0], max: said.span[1] } : null) : { min: zoom.min, max: zoom.max });
  chartKey(byId("chart-key"), kind.curves);
  const most = chart.beyond.reduce((a, b) => !a || b.value > a.value ? b : a, null);
  byId("chart-beyond").hidden = !most;
  if (most) text(byId("chart-beyond"), `Beyond the picture (▲): ${plural(chart.beyond.length, "round")}, up to ${kind.say(most.value)} in round ${count(said.round[most.index])}.`);
  const values = Object.entries(kind.curves).map(([name, label]) => { const known = said.series[name].filter(v => v != null); return known.length ? `${label} from ${kind.say(known[0])} to ${kind.say(known[known.length - 1])}` : ""; });
  byId("chart").setAttribute("aria-label", `Chart of ${kind.label} by ${AXES[axis]}, ${plural(said.inside, "round")}: ${values.filter(Boolean).join(", ")}.`);
  byId("chart").dataset.points = said.x.length;
  byId("chart").dataset.rounds = said.inside;
  chart.tell();
  showMarks(said.marks);
}
function showMarks(marks) {
  byId("marks-part").hidden = !marks.length;
  text(byId("marks-count"), `${plural(marks.length, "mark")} in the picture`);
  byId("marks").replaceChildren(...marks.map(mark => element("li", {}, element("a", { href: `#/round/${mark.round}` }, `${mark.text[0].toUpperCase()}${mark.text.slice(1)}`))));
}
const placeOf = (said, axis) => {
  if (axis === "round") return current.at;
  if (!current.run) return null;
  return axis === "tokens" ? current.run.tokens : current.run.last_commit_at;
};
const redraw = () => drawChart().catch(failed("chart-says"));
const refine = settled(redraw, 120);
const freshen = (() => { // at most every two seconds
  let due = 0;
  return () => { if (due) return; due = setTimeout(() => { due = 0; if (!current.over) redraw(); }, 2000); };
})();
const everythingAgain = () => { Object.assign(zoom, { min: null, max: null }); redraw(); };
byId("chart-kind").addEventListener("change", redraw);
byId("chart-axis").addEventListener("change", everythingAgain);
byId("zoom-in").addEventListener("click", () => chart.zoom(ZOOM));
byId("zoom-out").addEventListener("click", () => chart.zoom(1 / ZOOM));
byId("zoom-left").addEventListener("click", () => chart.pan(-PAN));
byId("zoom-right").addEventListener("click", () => chart.pan(PAN));
byId("zoom-all").addEventListener("click", () => chart.all());

// The run, wherever it is from.
function show(run) {
  current.run = run;
  showHeadline(run);
  showPassage(run.passage);
  showGoodput(run);
  showMembers(run);
  fitScrubber(run);
}

let told = { recorded: -1 };
function hear(run) {
  current.newest = run;
  current.live = run.live;
  if (current.at == null) { show(run); addEvents(run.events); } else byId("scrub").max = Math.max(run.last_recorded, 1);
  if (run.last_recorded === told.recorded) return;
  const first = told.recorded < 0;
  told = { recorded: run.last_recorded };
  if (first) redraw(); else if (zoom.min == null) freshen();
  if (current.at == null) { showContributions().catch(failed("credit")); showLinks().catch(failed("links-says")); }
}

let look = 0;
async function lookBack(round) {
  const mine = ++look;
  current.looking = true;
  try {
    const run = await ask("run", { round });
    if (mine !== look) return;
    current.at = run.committed;
    byId("past").hidden = byId("credit-whole").hidden = false;
    text(byId("past-text"), `The run as of round ${count(run.committed)}, ${moment(run.last_commit_at)}.`);
    text(byId("past-end"), current.live ? "Back to now" : "To its end");
    show(run);
    if (upTo !== run.last_commit_at + 0.001) { upTo = run.last_commit_at + 0.001; reloadEvents(); }
    showLinks(run.committed).catch(failed("links-says"));
    redraw();
    text(byId("trouble"), "");
  } catch (error) { if (mine === look) text(byId("trouble"), error.message); } finally { if (mine === look) current.looking = false; }
}

function now() {
  look++;
  current.looking = false;
  if (current.at == null) return;
  current.at = null;
  upTo = null;
  byId("past").hidden = byId("credit-whole").hidden = true;
  if (current.newest) show(current.newest);
  reloadEvents();
  showLinks().catch(failed("links-says"));
  redraw();
}

// Views
function openView(title, body) {
  byId("view-body").replaceChildren(...body.filter(Boolean));
  hintSideways(byId("view-body"));
  byId("overview").hidden = true;
  byId("view").hidden = false;
  text(byId("view-title"), title);
  byId("view-title").focus({ preventScroll: true });
  scrollTo(0, 0);
}
function closeView() {
  if (byId("view").hidden) return;
  byId("view").hidden = true;
  byId("view-body").replaceChildren();
  byId("overview").hidden = false;
  chart.fit();
  byId("main").focus({ preventScroll: true });
}
function leaveView() {
  if (byId("view").hidden) return;
  closeView();
  location.hash = current.at == null ? "#/" : `#/at/${current.at}`;
}
addEventListener("keydown", event => { if (event.key === "Escape" && !event.defaultPrevented) leaveView(); });
function route() {
  const [, kind, ...rest] = location.hash.split("/"), what = decodeURIComponent(rest.join("/"));
  if (!location.hash.startsWith("#/") && location.hash) return; // a place in the page
  const wrong = error => openView("Not found", [element("p", {}, error.message)]);
  if (kind === "node") showNode(what).catch(wrong);
  else if (kind === "round") showRound(what).catch(wrong);
  else if (kind === "at") { closeView(); lookBack(Number(what) || 1); }
  else { closeView(); now(); }
}
addEventListener("hashchange", route);
follow(hear, words => text(byId("trouble"), words), () => {
  current.over = true;
  text(byId("trouble"), "");
  text(byId("over"), "The run is over; this is its last state.");
});
reloadEvents();
const zone = `Times are of the zone ${Intl.DateTimeFormat().resolvedOptions().timeZone}.`;
for (const place of ["zone", "events-zone"]) text(byId(place), zone);
if (location.hash.startsWith("#/")) route();
