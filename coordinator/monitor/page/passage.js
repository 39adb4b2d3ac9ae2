// What the model writes: text of validation data, and how it goes on, as the node says that measured its loss.
const passageText = passage => [element("span", { class: "prompt" }, passage.prompt), passage.text];

function showPassage(passage) {
  byId("passage").hidden = !passage;
  if (!passage) return;
  byId("passage-text").replaceChildren(...passageText(passage));
  text(byId("passage-says"), `After round ${count(passage.round)}, as ${passage.name} says; the dim beginning was given.`);
}
