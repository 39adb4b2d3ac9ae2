// The run in figures, its phase and why, and what the last round was like.
const FIGURES = ["Loss", "Tokens", "Tokens a second", "Fleet goodput", "Compute utilisation", "Finishes", "Round"];
const figures = Object.fromEntries(FIGURES.map(name => {
  const label = element("dt", {}, name), value = element("span"), note = element("small");
  byId("figures").append(element("div", {}, label, element("dd", {}, value, note)));
  return [name, { label, value, note }];
}));

function figure(name, value, note = "") {
  text(figures[name].value, value);
  text(figures[name].note, note);
}

function showHeadline(run) {
  document.title = `Atoll: ${run.run_id}`;
  text(byId("name"), `Atoll: ${run.run_id}`);
  const { pace } = run, done = run.phase === "finished";
  if (run.val_loss != null) figure("Loss", digits(run.val_loss), `validation, nats a token${run.train_loss == null ? "" : `; train ${digits(run.train_loss)}`}`);
  else figure("Loss", digits(run.train_loss) || "not measured", run.train_loss == null ? "" : "train, nats a token");
  figure("Tokens", short(run.tokens), count(run.tokens));
  figure("Tokens a second", pace.tokens_per_s == null ? "not known" : short(pace.tokens_per_s), "committed, in the latest rounds");
  const accounted = Object.values(run.goodput_seconds).some(seconds => seconds > 0);
  figure("Fleet goodput", accounted ? percent(run.fleet_goodput) : "not known", "of all the nodes' time was training that counts");
  figure("Compute utilisation", accounted ? percent(run.compute_utilisation) : "not known", "training, of training and exchange alone");
  text(figures.Finishes.label, done ? "Finished" : "Finishes");
  if (done) figure("Finishes", "done", run.last_commit_at ? moment(run.last_commit_at) : "");
  else if (pace.seconds_left != null) figure("Finishes", `in ${remaining(pace.seconds_left)}`, `${soon(toGrain(run.ends_at, Math.max(grain(pace.seconds_left), 60)))}, at ${span(pace.round_s)} a round`);
  else if (run.rounds_total) figure("Finishes", pace.round_s == null ? "not known yet" : "not known", pace.round_s == null ? "" : `it stands still; usually ${span(pace.round_s)} a round`);
  else figure("Finishes", "open end", "the run has no last round");
  figure("Round", run.rounds_total ? `${count(run.round)} of ${count(run.rounds_total)}` : count(run.round), `${plural(run.committed - run.void_rounds, "round")} committed${run.void_rounds ? `, ${count(run.void_rounds)} void` : ""}`);
  // A reason that the last round's sentence has is not said twice.
  const last = run.last_round, said = last && last.round === run.round && last.why.toLowerCase().includes(run.phase_reason.toLowerCase());
  text(byId("phase"), `Round ${count(run.round)}: ${phaseWord(run.phase)}. ${said ? "" : sentence(run.phase_reason)}${awaits(run)}${run.draining ? " The coordinator is stopping for a while." : ""}`);
  showLastRound(last);
}

const sentence = words => words ? `${words[0].toUpperCase()}${words.slice(1)}.` : "";

function awaits(run) {
  const names = run.awaited, told = run.phase_reason.split("waits for ")[1] || "";
  if (names.every(name => told.includes(name))) return ""; // the phase's reason has said it
  return ` The round waits for ${names.slice(0, 5).join(", ")}${names.length > 5 ? ` and ${names.length - 5} more` : ""}.`;
}

function showLastRound(last) {
  const place = byId("last-round");
  place.hidden = !last;
  if (!last) return;
  const link = place.firstElementChild || place.appendChild(element("a"));
  link.href = `#/round/${last.round}`;
  text(link, `Round ${count(last.round)}`);
  const rest = place.childNodes[1] || place.appendChild(document.createTextNode(""));
  const usual = last.usual ? ` (usually ${span(last.usual)})` : "";
  const said = ` took ${span(last.seconds)}${usual}. ${last.why}`;
  if (rest.data !== said) rest.data = said;
}
