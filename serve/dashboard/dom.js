// Elements, made of text alone: whatever a name or an answer says is shown as it stands.

export const byId = (id) => document.getElementById(id);

export function element(tag, { className = "", text = "", title = "" } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  if (title) made.title = title;
  made.append(...children);
  return made;
}

// Changes what differs, so that a selection or a tooltip survives the next second.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function figure(name, text) {
  for (const node of document.querySelectorAll(`[data-figure="${name}"]`)) setText(node, text);
}

// A table's rows of texts; each cell of a row with a name is a figure of it.
export function rows(body, all) {
  while (body.rows.length > all.length) body.lastElementChild.remove();
  all.forEach(({ name, cells }, at) => {
    const row = body.rows[at] ?? body.insertRow();
    if (row.dataset.row !== name) row.dataset.row = name;
    while (row.cells.length > cells.length) row.lastElementChild.remove();
    cells.forEach((text, column) => setText(row.cells[column] ?? row.insertCell(), text));
  });
}

export function shown(node, yes) {
  node.hidden = !yes;
}
