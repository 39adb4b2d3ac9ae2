// Numbers and times in words.
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const BUCKET_WORDS = {
  inner: "training", sync: "exchange", recovering: "recovering", waiting: "waiting", paused: "paused", down: "down",
  lost: "lost", starting: "starting", open: "training, undecided",
};
const NODE_BUCKETS = { // of one node, in the order of its bar
  inner: "training, committed", open: "training, undecided", lost: "training, lost", sync: "exchange", waiting: "waiting",
  recovering: "recovering", starting: "starting", paused: "paused", down: "down",
};
const phaseWord = phase => ({ inner: "training", sync: "exchange" })[phase] || phase;
const KNOWN_HOW = { seen: "the coordinator saw it", agreed: "two sides say the same", told: "one member says so", guessed: "a guess" };

const count = value => whole.format(value);
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const percent = share => `${(100 * share).toFixed(1)} %`;
const digits = value => value == null ? "" : value.toFixed(3);

function short(value) { // 12.3 M
  if (value == null) return "";
  for (const [size, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  return Math.abs(value) >= 100 || Number.isInteger(value) ? count(value) : value.toPrecision(3);
}
const bytes = value => value == null ? "" : `${short(value).replace("G", "G").replace(/ ?$/, value < 1000 ? " " : "")}B`;
const rate = value => value == null ? "not measured" : `${bytes(value)}/s`;

function span(seconds, tenths = 1) { // in its two largest units
  if (seconds == null) return "not known";
  if (seconds < 59.95) return `${seconds.toFixed(tenths)} s`;
  const s = Math.round(seconds);
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor(s % 3600 / 60)).padStart(2, "0")} min`;
  return `${count(Math.floor(s / 86400))} d ${Math.floor(s % 86400 / 3600)} h`;
}

// What is yet to come is told less exactly the longer it is: to so many seconds.
const grain = seconds => seconds < 600 ? 1 : seconds < 3600 ? 60 : seconds < 6 * 3600 ? 600 : 3600;
const toGrain = (seconds, of) => Math.round(seconds / of) * of;
const remaining = seconds => seconds < 600 ? span(seconds, 0) : seconds < 3570 ? `${Math.round(seconds / 60)} min` : span(toGrain(seconds, grain(seconds)));

const two = n => String(n).padStart(2, "0");
const day = d => `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
const dateOf = at => new Date(at * 1000);
const clock = at => { const d = dateOf(at); return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`; };
const moment = at => at ? `${day(dateOf(at))} ${clock(at)}` : "not known";
const soon = at => { // without the day, if it is today
  const d = dateOf(at), time = `${two(d.getHours())}:${two(d.getMinutes())}`;
  return day(d) === day(new Date()) ? `today ${time}` : `${day(d)} ${time}`;
};
const minuteField = at => { const d = dateOf(at); return `${day(d)}T${two(d.getHours())}:${two(d.getMinutes())}`; };
