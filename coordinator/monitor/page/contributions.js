// Who contributed how much, by owner and by node.
let creditLimit = 20;
byId("credit-more").addEventListener("click", () => { creditLimit = 0; showContributions().catch(() => {}); });

async function showContributions() {
  const said = await ask("contributions", { limit: creditLimit });
  const share = tokens => percent(said.tokens ? tokens / said.tokens : 0);
  const first = said.nodes[0], best = said.owners[0];
  text(byId("credit"), !first ? "Nobody has contributed yet." :
    `${plural(said.nodes_total, "node")}${said.owners_total ? ` of ${plural(said.owners_total, "owner")}` : ""} contributed ${short(said.tokens)} tokens in ${plural(said.committed - current.newest.void_rounds, "round")}. ` +
    `Most came from ${best ? `${best.owner || "an owner not known"} (${share(best.tokens)}), and ` : ""}node ${first.name} (${share(first.tokens)}).` +
    (said.uncredited ? ` ${short(said.uncredited)} tokens are nobody's: the run kept no accounts then.` : ""));
  byId("owners-part").hidden = !said.owners.length;
  table(byId("owners"), said.owners, ["", "n", "n", "n", "n"], (a, c) =>
    [a.owner || "not known", count(a.nodes), count(a.rounds), short(a.tokens), share(a.tokens)].forEach((words, i) => text(c[i], words)));
  table(byId("accounts"), said.nodes, ["", "wide", "n", "n", "n"], (a, c) => {
    const once = a.former_names.length ? `once ${a.former_names.join(", ")}` : "";
    c[0].replaceChildren(nodeLink(a.node_id, a.name || a.node_id));
    if (once) c[0].append(element("small", {}, once));
    [a.owner || "not known", count(a.rounds), short(a.tokens), share(a.tokens)].forEach((words, i) => text(c[i + 1], words));
  });
  byId("credit-more").hidden = said.nodes.length >= said.nodes_total && said.owners.length >= said.owners_total;
}
