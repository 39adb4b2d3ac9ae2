// The members' table: those who need a look first, or by any column; found by words, or by state.
const FEW = 50;
const URGENCY = ["suspect", "recovering", "joining", "evicted", "synced", "active", "reducer", "left"];
const isHere = m => m.state !== "left" && m.state !== "evicted";
const number = m => Number(m.node_id.slice(1)) || 0;
const inTrouble = m => isHere(m) && (m.phase === "left out" || m.state === "suspect" || m.state === "recovering" || !!m.trouble || !!m.slow || !!m.pause);
const memory = m => m.device_bytes || m.trainer_rss_bytes || 0;
const doing = m => !isHere(m) ? "" : `${phaseWord(m.phase)}${m.ready ? ", ready" : m.reached ? ", has its steps" : ""}`;
const heard = m => isHere(m) && current.run && m.heard_at ? Math.max(current.run.now - m.heard_at, 0) : null;
const note = m => [m.slow, m.reason].filter(Boolean).join("; ");

// [heading, class, text of a member, what to sort by]
const COLUMNS = [
  ["Node", "", null, m => m.name.toLowerCase()],
  ["State", "", m => m.state, m => URGENCY.indexOf(m.state)],
  ["Role", "wide", m => m.role, m => m.role],
  ["Version", "wide far", m => m.version || "", m => m.version || ""],
  ["Doing", "wide", doing, doing],
  ["Step", "n wide", m => isHere(m) && m.inner_step ? count(m.inner_step) : "", m => -m.inner_step],
  ["Tokens/s", "n", m => isHere(m) && m.pace ? count(m.pace) : "", m => -(m.pace || 0)],
  ["Contributed", "n", m => m.contributed ? short(m.contributed) : m.weight ? short(m.weight) : "", m => -(m.contributed || m.weight || 0)],
  ["Loss", "n wide", m => isHere(m) && m.loss ? digits(m.loss) : "", m => -(m.loss || 0)],
  ["MFU", "n wide", m => m.mfu ? percent(m.mfu) : "", m => -(m.mfu || 0)],
  ["Data wait", "n wide far", m => isHere(m) && m.tokens_per_s ? percent(m.data_wait) : "", m => -m.data_wait],
  ["Memory", "n wide", m => isHere(m) && memory(m) ? bytes(memory(m)) : "", m => -memory(m)],
  ["Heard", "n wide", m => heard(m) == null ? "" : span(heard(m)), m => -(heard(m) || 0)],
];
const sorting = { column: null, down: false };
let everybody = false;

COLUMNS.forEach(([heading, kind], i) => {
  const button = element("button", { type: "button", onclick: () => sortBy(i) }, heading);
  byId("members-head").append(element("th", { scope: "col", class: kind }, button));
});
for (const [value, label] of [["", "everybody"], ["trouble", "who needs a look"], ["here", "who is here"], ...URGENCY.map(s => [s, s])])
  byId("members-only").append(element("option", { value }, label));
byId("members-find").addEventListener("input", settled(() => showMembers(current.run), 80));
byId("members-only").addEventListener("change", () => showMembers(current.run));
byId("members-more").addEventListener("click", () => { everybody = !everybody; showMembers(current.run); });

// Up, down, and back to who needs a look first.
function sortBy(column) {
  if (sorting.column !== column) Object.assign(sorting, { column, down: false });
  else if (!sorting.down) sorting.down = true;
  else Object.assign(sorting, { column: null, down: false });
  [...byId("members-head").children].forEach((th, i) => {
    // A column of numbers has its largest first.
    if (i === sorting.column) th.setAttribute("aria-sort", sorting.down === COLUMNS[i][1].startsWith("n") ? "ascending" : "descending");
    else th.removeAttribute("aria-sort");
  });
  showMembers(current.run);
}

const urgency = m => (inTrouble(m) ? 0 : 10) + URGENCY.indexOf(m.state);

function sorted(members) {
  const by = sorting.column == null ? urgency : COLUMNS[sorting.column][3], way = sorting.down ? -1 : 1;
  return members.map(m => [by(m), m]).sort(([a, m], [b, n]) => (a < b ? -way : a > b ? way : 0) || number(m) - number(n)).map(([, m]) => m);
}

function showMembers(run) {
  if (!run) return;
  const counts = {};
  for (const m of run.members) counts[m.state] = (counts[m.state] || 0) + 1;
  text(byId("counts"), URGENCY.filter(s => counts[s]).map(s => `${count(counts[s])} ${s}`).join(", ") || "nobody is here");
  const words = byId("members-find").value.toLowerCase().split(/\s+/).filter(Boolean), only = byId("members-only").value;
  const found = sorted(run.members.filter(m =>
    (!only || (only === "trouble" ? inTrouble(m) : only === "here" ? isHere(m) : m.state === only)) &&
    words.every(word => `${m.name} ${m.node_id} ${m.state} ${m.role} ${m.owner || ""} ${m.version || ""} ${note(m)}`.toLowerCase().includes(word))));
  const shown = everybody ? found : found.slice(0, FEW);
  const off = emptyColumns(shown, run.live && !run.recorded);
  hide(byId("members-head"), off);
  table(byId("members"), shown, COLUMNS.map(([, kind]) => kind), (m, cells, row) => {
    if (!cells[0].firstElementChild) cells[0].append(element("a"));
    const link = cells[0].firstElementChild, href = `#/node/${encodeURIComponent(m.node_id)}`;
    if (link.getAttribute("href") !== href) link.setAttribute("href", href);
    cell(cells[0], `${m.name} (${m.node_id})`, note(m), inTrouble(m) ? "warn" : "");
    for (let i = 1; i < COLUMNS.length; i++) text(cells[i], COLUMNS[i][2](m));
    const kind = `s-${m.state}`;
    if (cells[1].className !== kind) cells[1].className = kind;
    hide(row, off);
  });
  byId("members-none").hidden = found.length > 0;
  text(byId("members-none"), words.length || only ? "No such member." : "Nobody is here.");
  text(byId("members-head").children[7].firstElementChild, run.recorded ? "Of the round" : "Contributed");
  const more = byId("members-more");
  more.hidden = found.length <= FEW;
  text(more, everybody ? `Show the first ${FEW}` : `Show all ${count(found.length)}`);
  showAttention(run);
}

// Columns that say nothing of anybody are not shown; of a run that goes on, one that was shown stays, so that nothing
// moves between two rounds.
const usedColumns = new Set();
function emptyColumns(shown, lasting) {
  return COLUMNS.map(([, kind, words], i) => {
    const empty = kind.includes("wide") && i !== sorting.column && shown.length > 0 && shown.every(m => !words(m));
    if (lasting && shown.length && !empty) usedColumns.add(i);
    return empty && !(lasting && usedColumns.has(i));
  });
}

function hide(row, off) {
  off.forEach((hidden, i) => { if (row.cells[i].classList.contains("off") !== hidden) row.cells[i].classList.toggle("off", hidden); });
}

function showAttention(run) {
  const troubled = sorted_by_urgency(run.members.filter(inTrouble));
  byId("attention").hidden = !troubled.length && !run.put_out.length && !run.returned.length;
  const shown = troubled.slice(0, 6), more = troubled.length - shown.length;
  const said = [
    ...run.returned.map(m => [m, ` was away ${clock(m.since)} to ${clock(m.until)}: ${m.reason}`]),
    ...run.put_out.map(m => [m, ` was ${m.consequence} in round ${count(m.round)}: ${m.sentence}`]),
  ];
  const items = children(byId("attention-list"), shown.length + (more > 0) + said.length, () => element("li", {}, element("a"), element("span")));
  shown.forEach((m, i) => {
    const [link, said] = items[i].children;
    link.href = `#/node/${encodeURIComponent(m.node_id)}`;
    text(link, `${m.name} (${m.node_id})`);
    text(said, m.slow ? ` ${[m.slow, m.reason].filter(Boolean).join("; ")}` : ` is ${m.state}${m.reason ? `: ${m.reason}` : ""}`);
  });
  if (more > 0) {
    const [link, said] = items[shown.length].children;
    link.href = "#members-title"; text(link, `and ${plural(more, "member")} more`); text(said, "");
  }
  said.forEach(([m, words], i) => {
    const [link, rest] = items[items.length - said.length + i].children;
    link.href = `#/node/${encodeURIComponent(m.node_id)}`;
    text(link, `${m.name} (${m.node_id})`);
    text(rest, words);
  });
}

const sorted_by_urgency = members => [...members].sort((a, b) => urgency(a) - urgency(b) || number(a) - number(b));
