// One node: its state, its curves over the rounds, what is held against it, what was said of it.
const NODE_KINDS = {
  weight: { label: "tokens contributed", say: short }, loss: { label: "loss", say: digits }, tokens_per_s: { label: "tokens a second", say: short },
  exchange_s: { label: "seconds of the exchange", say: span }, bytes_up: { label: "bytes sent", say: bytes }, bytes_down: { label: "bytes received", say: bytes },
};

async function showNode(id) {
  const said = await ask(`node/${encodeURIComponent(id)}`);
  const member = (current.run ? current.run.members : []).find(m => m.node_id === id);
  const name = member ? member.name : said.name || id;
  const facts = element("dl", { class: "facts" });
  if (member) {
    fact(facts, "State", member.state);
    fact(facts, "Role", member.role);
    fact(facts, "Doing", doing(member) || "nothing");
    if (member.version) fact(facts, "Version", member.version);
    fact(facts, "Tokens a second", member.tokens_per_s ? count(member.tokens_per_s) : "takes no steps");
    if (member.loss) fact(facts, "Loss", digits(member.loss));
    if (member.gradient_norm) fact(facts, "Gradient norm", member.gradient_norm.toPrecision(3));
    if (memory(member)) fact(facts, "Memory", bytes(memory(member)));
    fact(facts, "Link", `sends ${rate(member.rate_up)}, receives ${rate(member.rate_down)}`);
    if (member.address) fact(facts, "Address", member.address);
  } else fact(facts, "State", "not here");
  const owner = member && member.owner || said.account && said.account.owner;
  if (owner) fact(facts, "Owner", owner);
  if (said.account) fact(facts, "Contributed", `${short(said.account.tokens)} tokens in ${plural(said.account.rounds, "round")}`);
  const kind = element("select", {}, ...Object.entries(NODE_KINDS).map(([value, { label }]) => element("option", { value }, label)));
  const place = element("div", { class: "chart" }), says = element("p", { class: "says" });
  const { series } = said, rows = series.round.length;
  const body = [
    facts, member && note(member) ? element("p", { class: inTrouble(member) ? "warn" : "" }, sentence(note(member))) : null,
    element("h3", {}, rows ? `Rounds ${count(series.round[0])} to ${count(series.round[rows - 1])}` : "No round yet"),
    element("div", { class: "controls" }, element("label", {}, "Show ", kind)), place, says,
    element("h3", {}, "Held against it"),
    said.evidence.length ? element("ol", { class: "events" }, ...[...said.evidence].reverse().map(evidenceLine)) : element("p", {}, "Nothing."),
    element("h3", {}, "Said of it"),
    said.events.length ? element("ol", { class: "events" }, ...said.events.map(eventLine)) : element("p", {}, "Nothing."),
  ];
  openView(`Node ${name}${name === id ? "" : ` (${id})`}`, body);
  if (!rows) return place.remove();
  const chart = new Chart(place, says, { pick: i => { location.hash = `#/round/${series.round[i]}`; }, zoomed: () => {} });
  place.setAttribute("aria-label", `Curve of node ${name} over the rounds. Arrow keys move, plus and minus zoom, Enter opens a round.`);
  const draw = () => {
    const { label, say } = NODE_KINDS[kind.value];
    chart.span = [series.round[0], series.round[rows - 1]];
    chart.show({ x: series.round, rows: series, describe: i => `Round ${count(series.round[i])}, ${moment(series.at[i])}` },
      { curves: { [kind.value]: label }, say, tick: value => short(value), time: false, axis: kind.value });
  };
  kind.addEventListener("change", draw);
  draw();
}

const evidenceLine = d => element("li", {}, element("time", { datetime: dateOf(d.at).toISOString() }, moment(d.at)),
  `Round ${d.evidence.round}: ${d.evidence.offence}, ${d.consequence} (weight ${d.weight}). ${d.evidence.sentence}`);
