// Bars of shares side by side.
function bar(place, parts, total) { // parts: [kind, value]
  const shown = children(place, parts.length, () => element("span"));
  parts.forEach(([kind, value], i) => {
    if (shown[i].className !== kind) shown[i].className = kind;
    const width = `${total > 0 ? 100 * Math.max(value, 0) / total : 0}%`;
    if (shown[i].style.width !== width) shown[i].style.width = width;
  });
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
