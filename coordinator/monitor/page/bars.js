// Bars of shares side by side.
function bar(place, parts, total) { // parts: [kind, value]
  const shown = children(place, parts.length, () => element("span"));
  parts.forEach(([kind, value], i) => {
    if (shown[i].className !== kind) shown[i].className = kind;
    const width = `${total > 0 ? 100 * Math.max(value, 0) / total : 0}%`;
    if (shown[i].style.width !== width) shown[i].style.width = width;
  });
}

// Seconds by bucket as a bar, and each in words below it.
function timeBar(seconds) {
  const parts = Object.keys(NODE_BUCKETS).map(kind => [kind, Math.max(seconds[kind] || 0, 0)]).filter(([, value]) => value > 0);
  const total = parts.reduce((sum, [, value]) => sum + value, 0), lane = element("div", { class: "bar", "aria-hidden": "true" });
  bar(lane, parts, total);
  return [lane, element("ul", { class: "key" }, ...parts.map(([kind, value]) => element("li", {}, swatch(kind), `${NODE_BUCKETS[kind]} ${span(value)} (${percent(value / total)})`)))];
}

function showGoodput(run) {
  const parts = Object.entries(run.goodput);
  bar(byId("goodput"), parts, 1);
  const key = children(byId("goodput-key"), parts.length, () => element("li", {}, swatch(""), element("span")));
  parts.forEach(([kind, share], i) => {
    key[i].firstElementChild.className = `swatch ${kind}`;
    text(key[i].lastElementChild, `${BUCKET_WORDS[kind] || kind} ${percent(share)}`);
  });
}
