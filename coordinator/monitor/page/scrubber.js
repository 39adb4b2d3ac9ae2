// Looking back: the run as of any of its rounds, by a slider, keys, or playing it.
const PLAY_MS = 400, PLAY_LOOKS = 200; // a run of any length is played in so many looks
let playing = 0;

const lastRound = () => Number(byId("scrub").max);
const lookTo = settled(round => { location.hash = round >= lastRound() && current.live ? "#/" : `#/at/${round}`; }, 60);

function fitScrubber(run) {
  const slider = byId("scrub"), last = Math.max(run.last_recorded, 1);
  const atEnd = current.at == null;
  byId("scrubber").hidden = run.last_recorded < 2;
  if (Number(slider.max) !== last && current.at == null || last > slider.max) slider.max = last;
  const at = atEnd ? last : current.at;
  if (document.activeElement !== slider || atEnd) slider.value = at;
  slider.setAttribute("aria-valuetext", atEnd ? `now, round ${count(last)}` : `round ${count(at)} of ${count(last)}`);
  text(byId("scrub-at"), atEnd ? (run.live ? "now" : `round ${count(last)}, the last`) : `round ${count(at)} of ${count(lastRound())}`);
}

function step(by) {
  const from = current.at ?? lastRound();
  lookTo(Math.min(Math.max(from + by, 1), lastRound()));
}

function stop() { clearInterval(playing); playing = 0; text(byId("scrub-play"), "Play"); }

function play() {
  if (playing) return stop();
  text(byId("scrub-play"), "Pause");
  let at = current.at ?? lastRound();
  if (at >= lastRound()) at = 0;
  playing = setInterval(() => {
    if (current.looking) return; // the last look is not here yet
    at = Math.min(at + Math.max(Math.round(lastRound() / PLAY_LOOKS), 1), lastRound());
    lookTo(at);
    if (at >= lastRound()) stop();
  }, PLAY_MS);
}
byId("scrub").addEventListener("input", () => { stop(); lookTo(Number(byId("scrub").value)); });
byId("scrub-back").addEventListener("click", () => { stop(); step(-1); });
byId("scrub-on").addEventListener("click", () => { stop(); step(1); });
byId("scrub-play").addEventListener("click", play);
byId("past-end").addEventListener("click", () => { stop(); location.hash = "#/"; });
