// One node: its state, where its time went, its curves over the rounds, what is held against it, what was said of it.
const NODE_KINDS = {
  weight: { label: "tokens contributed", say: short }, loss: { label: "loss", say: digits }, tokens_per_s: { label: "tokens a second", say: short },
  exchange_s: { label: "seconds of the exchange", say: span }, bytes_up: { label: "bytes sent", say: bytes }, bytes_down: { label: "bytes received", say: bytes },
};

async function showNode(id) {
  const said = await ask(`node/${encodeURIComponent(id)}`);
  const member = (current.run ? current.run.members : []).find(m => m.node_id === id);
  const name = member ? member.name : said.name || id;
  const body = [
    nodeFacts(member, said), member && note(member) ? element("p", { class: inTrouble(member) ? "warn" : "" }, sentence(note(member))) : null,
    ...nodeTime(member, said),
    ...nodeChart(id, name, said),
    element("h3", {}, "Held against it"),
    said.evidence.length ? element("ol", { class: "events" }, ...[...said.evidence].reverse().map(evidenceLine)) : element("p", {}, "Nothing."),
    element("h3", {}, "Said of it"),
    said.events.length ? element("ol", { class: "events" }, ...said.events.map(eventLine)) : element("p", {}, "Nothing."),
  ];
  openView(`Node ${name}${name === id ? "" : ` (${id})`}`, body);
}

function nodeFacts(member, said) {
  const facts = element("dl", { class: "facts" });
  fact(facts, "State", member && (isHere(member) || !said.standing) ? member.state : said.standing || "gone");
  if (member) {
    fact(facts, "Role", member.role);
    fact(facts, "Doing", doing(member) || "nothing");
    if (member.version) fact(facts, "Version", member.version);
    fact(facts, "Tokens a second", member.pace ? count(member.pace) : "not known");
    if (!current.run.recorded) fact(facts, "In its latest steps", member.tokens_per_s ? `${count(member.tokens_per_s)} tokens a second, without its rests` : "takes none now");
    if (member.loss) fact(facts, "Loss", digits(member.loss));
    if (member.gradient_norm) fact(facts, "Gradient norm", member.gradient_norm.toPrecision(3));
    if (memory(member)) fact(facts, "Memory", bytes(memory(member)));
    fact(facts, "Link", `sends ${rate(member.rate_up)}, receives ${rate(member.rate_down)}`);
    if (member.address) fact(facts, "Address", member.address);
  }
  const owner = member && member.owner || said.account && said.account.owner;
  if (owner) fact(facts, "Owner", owner);
  if (said.account) fact(facts, "Contributed", `${short(said.account.tokens)} tokens in ${plural(said.account.rounds, "round")}`);
  return facts;
}

// Its seconds by bucket: of a member of a living run all of them, else those that the records have.
function nodeTime(member, { spent }) {
  const whole = member && member.seconds && Object.keys(member.seconds).length;
  if (!whole && !spent) return [];
  const of = whole ? "Since it first joined." : `In rounds ${count(spent.first)} to ${count(spent.last)}, as their records have it.`;
  return [element("h3", {}, "Where its time went"), element("p", { class: "says" }, of), ...timeBar(whole ? member.seconds : spent.seconds)];
}

// The node's curves: its latest rounds at first, and any others by zooming; they are asked for again.
function nodeChart(id, name, { series, last }) {
  const title = element("h3", {}, "No round yet");
  if (!series.round.length) return [title];
  const kind = element("select", {}, ...Object.entries(NODE_KINDS).map(([value, { label }]) => element("option", { value }, label)));
  const place = element("div", { class: "chart" }), says = element("p", { class: "says" });
  let looks = 0;
  const look = settled(async ({ min, max }) => {
    const mine = ++looks;
    try {
      const said = await ask(`node/${encodeURIComponent(id)}`, { from: Math.max(Math.floor(min), 1), to: Math.ceil(max) });
      if (mine !== looks) return;
      series = said.series;
      draw({ min, max });
    } catch (error) { text(says, error.message); }
  }, 120);
  const chart = new Chart(place, says, { pick: i => { location.hash = `#/round/${series.round[i]}`; }, zoomed: look });
  chart.span = [1, last];
  const draw = range => {
    const { label, say } = NODE_KINDS[kind.value], { round } = series;
    chart.show({ x: round, round, rows: series, describe: i => `Round ${count(round[i])}, ${moment(series.at[i])}` },
      { curves: { [kind.value]: label }, say, tick: value => short(value), time: false, axis: kind.value, gaps: true }, range);
    text(title, `Rounds ${count(round[0])} to ${count(round[round.length - 1])}`);
  };
  kind.addEventListener("change", () => draw(chart.given));
  draw();
  place.setAttribute("aria-label", `Curve of node ${name} over the rounds. Arrow keys move, plus and minus zoom, Enter opens a round.`);
  const button = (words, label, does) => element("button", { type: "button", "aria-label": label, onclick: does }, words);
  const buttons = element("span", { class: "buttons", role: "group", "aria-label": "Zoom" },
    button("+", "Zoom in", () => chart.zoom(ZOOM)), button("\u2212", "Zoom out", () => chart.zoom(1 / ZOOM)),
    button("\u2190", "Earlier", () => chart.pan(-PAN)), button("\u2192", "Later", () => chart.pan(PAN)),
    element("button", { type: "button", onclick: () => chart.all() }, "Whole run"));
  return [title, element("div", { class: "controls" }, element("label", {}, "Show ", kind), buttons), place, says];
}

const CONSEQUENCES = {
  struck: "Given a strike", "no owner": "Not to own chunks", "no contributor": "In quarantine", evicted: "Evicted", banned: "Banned", pardoned: "Pardoned",
};
const evidenceLine = d => element("li", {}, hourButton(d.at),
  ` ${CONSEQUENCES[d.consequence] || d.consequence} for ${d.evidence.offence.replaceAll("_", " ")} in round ${count(d.evidence.round)}: ${d.evidence.sentence}. Its strikes weigh ${short(d.weight)} together.`);
