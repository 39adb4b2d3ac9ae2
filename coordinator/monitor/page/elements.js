// Elements of the document. What others said (names, sentences) becomes text, never markup.
const byId = id => document.getElementById(id);

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
  return node;
}

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child != null));
  return made;
}

// As many children as needed; those that are there are used again.
function children(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(make());
  return parent.children;
}

// A cell's text, and beneath it a smaller line.
function cell(td, value, note = "", kind = "") {
  let link = td.firstElementChild;
  if (link && link.tagName === "A") text(link, value);
  else if (note || td.childElementCount) {
    if (!td.querySelector("span")) td.replaceChildren(element("span"));
    text(td.querySelector("span"), value);
  } else return text(td, value);
  let small = td.querySelector("small");
  if (note && !small) td.append(small = element("small"));
  if (small) {
    text(small, note);
    if (small.className !== kind) small.className = kind;
    small.hidden = !note;
  }
  return td;
}

// A table's rows: so many at once, and as many more in each of the next frames, so that none takes long.
const ROWS_AT_ONCE = 60;
const drawings = new WeakMap(); // of a table's body: its latest drawing, which ends those before
function table(body, items, columns, fill) {
  const mine = {};
  drawings.set(body, mine);
  while (body.children.length > items.length) body.lastElementChild.remove();
  let row = body.firstElementChild, i = 0;
  const draw = () => {
    if (drawings.get(body) !== mine) return;
    for (const end = Math.min(i + ROWS_AT_ONCE, items.length); i < end; i++) {
      if (!row) body.append(row = element("tr", {}, ...columns.map(kind => element("td", { class: kind }))));
      fill(items[i], row.cells, row);
      row = row.nextElementSibling;
    }
    if (i < items.length) requestAnimationFrame(draw);
  };
  draw();
}

function fact(list, name, value) {
  list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
}

function nodeLink(id, name) {
  return element("a", { href: `#/node/${encodeURIComponent(id)}` }, name === id ? name : `${name} (${id})`);
}

function swatch(kind) {
  return element("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
}

// Do `what` once calls have ceased for so many milliseconds.
function settled(what, ms) {
  let timer = 0;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => what(...given), ms); };
}

// A table that is wider than its place says so, above it.
const hintAtWidth = new ResizeObserver(entries => {
  for (const place of new Set(entries.map(({ target }) => target.closest(".scroll")).filter(Boolean)))
    place.firstElementChild.hidden = place.scrollWidth <= place.clientWidth;
});
function hintSideways(within) {
  for (const wide of within.querySelectorAll(".scroll > table")) {
    const place = wide.parentElement;
    place.prepend(element("p", { class: "says sideways", hidden: "" }, "The table is wider than the screen: it scrolls sideways."));
    hintAtWidth.observe(place);
    hintAtWidth.observe(wide);
  }
}
hintSideways(document);

// A list that is longer than its place says so, until its end is seen.
function hintBelow(place) {
  const look = () => place.classList.toggle("more", place.scrollTop + place.clientHeight < place.scrollHeight - 1);
  place.addEventListener("scroll", look, { passive: true });
  for (const part of [place, place.firstElementChild]) new ResizeObserver(look).observe(part);
}
document.querySelectorAll(".tall").forEach(hintBelow);
