// One round: what it was like, why it took long, where each node's time went, who was slow and by how much.
const PARTS = { inner: "training", wait: "waiting", exchange: "exchange", recovery: "recovery", paused: "paused", down: "down" };
const PHASE_WORDS = { inner: "Training", collect: "Closing", reduce: "Exchange", commit: "Commit" };
const VOID = "It was committed, and then lost with all who had its state. It keeps its number, and nothing of it counts: neither its tokens nor its loss. The run went on from the state before it.";
const MANY = 60; // nodes that are drawn at first

async function showRound(number) {
  const said = await ask(`round/${encodeURIComponent(number)}`), { record } = said;
  const facts = element("dl", { class: "facts" });
  fact(facts, "Took", `${span(said.seconds)}${said.usual.wall ? `, usually ${span(said.usual.wall)}${moreBy(said.seconds / said.usual.wall - 1)}` : ""}`);
  fact(facts, "Committed", hourButton(record.committed_at));
  if (!record.void) fact(facts, "Train loss", digits(record.train_loss));
  if (record.val_loss != null) fact(facts, "Validation loss", digits(record.val_loss));
  if (!record.void) fact(facts, "Contributors", `${count(Object.keys(record.contributors).length)} of ${plural(said.members, "member")}`);
  fact(facts, "Attempts", count(record.attempts));
  for (const [phase, seconds] of Object.entries(record.seconds)) fact(facts, PHASE_WORDS[phase] || phase, span(seconds) + usually(said.usual.phases[phase]));
  if (record.predicted) fact(facts, "Exchange as predicted", span(record.predicted));
  if (!record.void) fact(facts, "Same state everywhere", record.digests_equal == null ? "not told" : record.digests_equal ? "yes" : "no");
  const parts = Object.keys(PARTS).filter(part => said.waterfall.some(row => row[part] > 0.0005));
  const most = Math.max(...said.waterfall.map(row => parts.reduce((sum, part) => sum + (row[part] || 0), 0)), 1e-9);
  const rows = element("tbody");
  const heads = ["Node", "", ...parts.map(part => PARTS[part])].map((label, i) =>
    i === 1 ? element("td") : element("th", { scope: "col", class: i > 1 ? "n wide" : "" }, label));
  const draw = shown => table(rows, shown, ["", "grow", ...parts.map(() => "n wide")], (row, c) => {
    c[0].replaceChildren(nodeLink(row.node_id, row.name));
    if (!row.contributed && !record.void) c[0].append(element("small", {}, "without a contribution"));
    const lane = element("div", { class: "bar", role: "img", "aria-label": parts.map(part => `${PARTS[part]} ${span(row[part] || 0)}`).join(", ") });
    bar(lane, parts.map(part => [part, row[part] || 0]), most);
    c[1].replaceChildren(lane);
    parts.forEach((part, i) => text(c[i + 2], span(row[part] || 0)));
  });
  draw(said.waterfall.slice(0, MANY));
  const more = said.waterfall.length > MANY ? element("button", { type: "button", onclick: () => { draw(said.waterfall); more.remove(); } }, `Show all ${count(said.waterfall.length)}`) : null;
  const estimated = said.waterfall.some(row => row.estimated);
  openView(`Round ${count(record.round)}`, [
    element("p", { class: "controls" },
      record.round > 1 ? element("a", { href: `#/round/${record.round - 1}` }, "Round before") : null,
      record.round < said.last ? element("a", { href: `#/round/${record.round + 1}` }, "Round after") : null,
      element("a", { href: `#/at/${record.round}` }, "The run as of this round")),
    element("p", { class: record.void ? "bad" : "" }, said.why), facts,
    ...(record.void ? [element("h3", {}, "What a void round is"), element("p", {}, VOID)] : []),
    ...verdictFacts(said), ...failureTable(said),
    record.void && !said.slow.length ? null : element("h3", {}, "Who was slower than the others"),
    record.void && !said.slow.length ? null : said.slow.length ? element("ul", {}, ...said.slow.slice(0, 30).map(s => element("li", {}, nodeLink(s.node, s.name), s.sentence.startsWith(s.name) ? s.sentence.slice(s.name.length) : `: ${s.sentence}`))) : element("p", {}, "Nobody was much slower than the others."),
    said.why.toLowerCase().includes(record.reason.toLowerCase()) ? null : element("p", {}, sentence(record.reason)),
    element("h3", {}, "Where each node's time went"),
    element("p", { class: "key" }, ...parts.map(part => element("span", {}, swatch(part), PARTS[part]))),
    estimated ? element("p", { class: "says" }, "Estimated from each node's tokens and pace.") : null,
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Time of each node" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), rows)),
    more,
    said.passage ? element("h3", {}, "What the model wrote after it") : null,
    said.passage ? element("blockquote", { class: "passage", tabindex: "0" }, ...passageText(said.passage)) : null,
    element("h3", {}, "Events"),
    said.events.length ? element("ol", { class: "events" }, ...said.events.map(eventLine)) : element("p", {}, "None."),
  ]);
}
// What was to blame, how that is known, and what stands beside it.
function verdictFacts({ why, verdict: known, record: { verdict } }) {
  if (!known) return [];
  const facts = element("dl", { class: "facts" });
  fact(facts, "Kind", verdict.kind);
  if (verdict.name) fact(facts, verdict.peer ? "Between" : "Who", element("span", {}, whom(verdict.culprit, verdict.name), ...(verdict.peer ? [" and ", whom(verdict.peer, verdict.peer_name)] : [])));
  fact(facts, "Known", KNOWN_HOW[verdict.confidence] || verdict.confidence);
  if (verdict.slower) fact(facts, "Slower than usual", span(verdict.slower));
  if (verdict.seconds) fact(facts, verdict.slower ? "Of that by this" : "By this", span(Math.min(verdict.seconds, verdict.slower || Infinity)));
  for (const [name, value] of verdict.facts) fact(facts, sentence(name).slice(0, -1), value);
  const said = why.toLowerCase().includes(verdict.sentence.toLowerCase());
  return [element("h3", {}, "The verdict"), said ? null : element("p", {}, sentence(verdict.sentence)), facts,
    ...(verdict.beside.length ? [element("p", {}, "Besides:"), element("ul", {}, ...verdict.beside.map(words => element("li", {}, words)))] : [])];
}
const whom = (id, name) => /^n\d+$/.test(id) ? nodeLink(id, name) : name; // a data store has no view

// What each failure of a member cost, as it is known now; one that is over is told of again, in the round in which it was.
function failureTable({ failures, names, record: { round } }) {
  if (!failures.length) return [];
  const rows = element("tbody");
  const heads = ["Member", "What", "To detect", "To recover", "Own steps lost", "Others' time lost"];
  table(rows, failures, ["", "wide", "n", "n", "n wide", "n"], (f, c) => {
    c[0].replaceChildren(nodeLink(f.node, names[f.node] || f.node), f.round === round ? "" : element("small", {}, `noticed in round ${count(f.round)}`));
    text(c[1], f.reason); text(c[2], span(f.detected)); text(c[3], f.recovered == null ? "not yet" : span(f.recovered));
    text(c[4], span(f.lost)); text(c[5], span(f.waited));
  });
  return [element("h3", {}, "Failures"), element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Failures of members" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((label, i) => element("th", { scope: "col", class: ["", "wide", "n", "n", "n wide", "n"][i] }, label)))), rows))];
}
const moreBy = share => Math.abs(share) < 0.045 ? "" : ` (${share < 0 ? "\u2212" : "+"}${count(Math.abs(100 * share))}\u00a0%)`;
const usually = seconds => seconds > 0.05 ? `, usually ${span(seconds)}` : "";
