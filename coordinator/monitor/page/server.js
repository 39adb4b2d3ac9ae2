// What the server says: single answers, and the run as it changes.
async function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const answer = await fetch(given.length ? `api/${path}?${new URLSearchParams(given)}` : `api/${path}`);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300).trim() || `the server says ${answer.status}`);
  return answer.json();
}

const POLL_MS = 3000, SILENCE_MS = 8000;

// Calls `tell(run)` with each snapshot, `trouble(sentence)` when nothing comes, `over()` when nothing more can. The
// stream ends now and then and is opened again by the browser; where it cannot be had at all, the run is asked for
// again and again.
function follow(tell, trouble, over) {
  let run = null, lost = null, source = null, polling = false; // `lost`: since when nobody answers
  const heard = () => { lost = null; trouble(""); };
  const take = next => { run = next; heard(); tell(run); };
  const failed = () => { // whether to give up: a finished run that does not answer twice
    const again = lost != null;
    lost ??= performance.now();
    if (again && run && run.phase === "finished") { source.close(); over(); return true; }
    return false;
  };
  const poll = async () => {
    try { take(await ask("run")); } catch (error) {
      if (failed()) return;
      trouble(`The coordinator does not answer: ${error.message}`);
    }
    if (run && !run.live) return;
    setTimeout(poll, POLL_MS);
  };
  const fallBack = () => { if (!polling) { polling = true; source.close(); poll(); } };
  const open = () => {
    source = new EventSource("api/stream");
    source.addEventListener("run", event => {
      take(JSON.parse(event.data));
      if (!run.live) source.close();
    });
    source.addEventListener("change", event => {
      const change = JSON.parse(event.data);
      if (!run) return;
      const gone = new Set(change.gone || []), moved = { ...change.members };
      const members = run.members.filter(m => !gone.has(m.node_id)).map(m => {
        const more = moved[m.node_id];
        delete moved[m.node_id];
        return more ? { ...m, ...more } : m;
      });
      take({ ...run, ...change.set, members: [...members, ...Object.values(moved)] });
    });
    source.onopen = heard; // a run in which nothing changes has nothing to tell
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) return fallBack(); // the server refused it
      if (!failed() && performance.now() - lost > SILENCE_MS) trouble("The coordinator does not answer: it is asked again and again");
    };
  };
  open();
}
