// Regions, and what each node's link carries.
async function showLinks(round) {
  const said = await ask("links", { round });
  const many = said.regions.length > 1;
  const levels = said.levels > 1 ? " in two levels" : "";
  const predicted = said.predicted.used ? `, predicted ${span(said.predicted.used)}` : "";
  text(byId("links-says"), said.round
    ? `${many ? plural(said.regions.length, "region") : "One region"}. The exchange of round ${count(said.round)} took ${span(said.measured)}${levels}${predicted}.`
    : "No exchange was measured yet.");
  const nodes = [...said.nodes].sort((a, b) => (a.rate_up ?? Infinity) - (b.rate_up ?? Infinity));
  table(byId("links"), nodes.slice(0, 200), ["", "", "n", "n", "n", "n wide", "n wide"], (n, c) => {
    c[0].replaceChildren(nodeLink(n.node_id, n.name));
    [many ? String.fromCharCode(65 + n.region % 26) : "A", rate(n.rate_up), rate(n.rate_down), percent(n.share), bytes(n.bytes_up), bytes(n.bytes_down)]
      .forEach((words, i) => text(c[i + 1], words));
  });
  byId("between-part").hidden = !said.between.length || !many;
  byId("between-head").replaceChildren(element("td"), ...said.between.map((_, i) => element("th", { scope: "col", class: "n" }, String.fromCharCode(65 + i))));
  byId("between").replaceChildren(...said.between.map((row, i) => element("tr", {},
    element("th", { scope: "row" }, String.fromCharCode(65 + i)), ...row.map(s => element("td", { class: "n" }, s == null ? "" : (1000 * s).toFixed(1))))));
}
