// Trains the network of this folder. step.onnx takes a batch and the training state and gives the
// loss and the renewed state; manifest.json says which output feeds which input.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
  int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
};
const KINDS = { image: "images", audio: "audio", table: "rows of a table" };
const SHOWN = 40; // held-out examples in the gallery
const $ = (id) => document.getElementById(id);
const fetched = async (name) => {
  const response = await fetch(name);
  if (!response.ok) throw Error(`${name}: ${response.status} ${response.statusText}`);
  return response;
};
const bytes = async (name) => (await fetched(name)).arrayBuffer();
const loaded = {};
const shared = (name) => (loaded[name] ??= bytes(name)); // fetched once

let ort, device; // the runtime, and where it computes
let manifest, web, columns; // columns: the examples, one entry for each input of the step
let pictures; // the column that can be drawn
let sessions = {}, state, random;
let trained; // {file, session} of the weights as they are now
let history = [], drawn = [], running = false;

// ---- the runtime -------------------------------------------------------------------------------

async function use(name) {
  const next = await import(`./runtime/${name}.js`);
  const place = (file) => new URL(`runtime/${name}-threaded.${file}`, document.baseURI).href;
  next.env.wasm.wasmPaths = { mjs: place("js"), wasm: place("wasm") };
  const options = { executionProviders: [name], logSeverityLevel: 3 };
  const made = {};
  for (const part of ["step", "evaluate", "init", "weights"]) {
    const { file, data = [] } = manifest[part]; // weights that several graphs read lie in files beside them
    const externalData = await Promise.all(data.map(async (path) => ({ path, data: new Uint8Array(await shared(path)) })));
    made[part] = await next.InferenceSession.create(await bytes(file), { ...options, externalData });
  }
  for (const session of Object.values(sessions)) await session.release();
  [ort, device, sessions, trained] = [next, name, made, null];
  if (state) // goes on elsewhere
    for (const [key, { type, data, dims }] of Object.entries(state)) state[key] = new ort.Tensor(type, data, dims);
}

// Run a graph on values by name. The runtime would say of a wrong size that dimensions are invalid.
function run(part, values) {
  const session = sessions[part];
  for (const { name, shape } of session.inputMetadata) {
    const { dims } = values[name];
    if (shape.every((size, i) => typeof size !== "number" || size === dims[i])) continue;
    throw Error(shape[0] === dims[0] || !(name in manifest.step.batch)
      ? `${manifest[part].file} takes '${name}' of shape ${shape.join(" x ")}, not ${dims.join(" x ")}.`
      : `Wrong batch size: ${manifest[part].file} takes ${shape[0]} examples at once, and '${name}' has ` +
        `${dims[0]}. Fill a batch up with examples of weight 0, or export the step for any batch size.`);
  }
  return session.run(Object.fromEntries(session.inputNames.map((name) => [name, values[name]])));
}

// ---- examples ----------------------------------------------------------------------------------

async function readExamples() {
  const { file, count, arrays } = web.examples;
  const buffer = await bytes(file);
  columns = Object.entries(manifest.step.batch).map(([name, { dtype, shape, role }]) => {
    const size = shape.slice(1).reduce((a, b) => a * b, 1);
    const all = new ARRAYS[dtype](buffer, arrays[name], count * size);
    return { name, dtype, role, shape: shape.slice(1), size, all };
  });
  pictures = columns.find(({ name }) => name === web.drawing?.input);
}

// Example i of a column: of the file, or drawn by hand.
const value = (column, i) => i < web.examples.count
  ? column.all.subarray(i * column.size, (i + 1) * column.size)
  : drawn[i - web.examples.count][column.name];

const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);
const training = () => range(web.examples.held_out, web.examples.count + drawn.length);
const testing = () => web.examples.held_out ? range(0, web.examples.held_out) : training();

// A batch has one size: the last one is filled up with examples that weigh nothing.
function batch(indices) {
  const [first] = Object.values(manifest.step.batch);
  const count = typeof first.shape[0] === "number" ? first.shape[0] : indices.length;
  const values = {};
  for (const column of columns) {
    const { name, dtype, role, shape, size, all } = column;
    const data = new all.constructor(count * size);
    for (let i = 0; i < count; i++) {
      const fill = role === "weight" && i >= indices.length;
      if (!fill) data.set(value(column, indices[i % indices.length]), i * size);
    }
    values[name] = new ort.Tensor(dtype, data, [count, ...shape]);
  }
  return values;
}

function* batches(indices) {
  const [first] = Object.values(manifest.step.batch);
  const size = typeof first.shape[0] === "number" ? first.shape[0] : 32;
  for (let i = 0; i < indices.length; i += size) yield indices.slice(i, i + size);
}

// Mulberry32, so that a training can be repeated.
function generator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

function shuffled(list) {
  for (let i = list.length - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [list[i], list[j]] = [list[j], list[i]];
  }
  return list;
}

// ---- training ----------------------------------------------------------------------------------

async function start() {
  state = await run("init", {});
  [history, trained, random] = [[], null, generator(0)];
  await record(null);
}

// One pass over the training examples; the mean loss, or null where it was stopped.
async function epoch() {
  const { state: renewed, loss, finite } = manifest.step;
  const list = shuffled(training());
  let total = 0, seen = 0, shown = performance.now();
  for (const indices of batches(list)) {
    const found = await run("step", { ...state, ...batch(indices) });
    if (!found[finite].data[0]) throw Error("The loss is not finite: this step changed nothing.");
    state = Object.fromEntries(Object.entries(renewed).map(([name, next]) => [name, found[next]]));
    trained = null;
    total += Number(found[loss].data[0]) * indices.length;
    seen += indices.length;
    if (performance.now() - shown > 30) {
      $("progress").value = seen / list.length;
      await new Promise((done) => setTimeout(done));
      shown = performance.now();
    }
    if (!running) return seen === list.length ? total / seen : null;
  }
  return total / seen;
}

// Means over the held-out examples, of the sums that evaluate.onnx gives for each batch.
async function evaluated() {
  const means = Object.entries(manifest.evaluate.sums).filter(
    ([name, outputs]) => /^(loss|accuracy)$/.test(name) && outputs.length === 2);
  const sums = Object.fromEntries(means.map(([name]) => [name, [0, 0]]));
  for (const indices of batches(testing())) {
    const found = await run("evaluate", { ...state, ...batch(indices) });
    for (const [name, outputs] of means)
      outputs.forEach((output, i) => { sums[name][i] += Number(found[output].data[0]); });
  }
  return Object.fromEntries(Object.entries(sums).map(([name, [sum, count]]) => [name, sum / count]));
}

async function record(loss) {
  history.push({ epoch: history.length, training: loss, ...(await evaluated()) });
  show();
  await examine();
}

async function train() {
  const count = Math.max(1, Math.min(1000, Math.round(Number($("epochs").value)) || 1));
  $("epochs").value = count;
  running = true;
  enable();
  try {
    for (let i = 1; i <= count && running; i++) {
      say(`Epoch ${i} of ${count}…`, true);
      const began = performance.now();
      const loss = await epoch();
      if (loss !== null) await record(loss);
      const seconds = ((performance.now() - began) / 1000).toFixed(1);
      if (loss !== null) say(`Epoch ${i} of ${count}: ${summary()} (${seconds} s)`, i < count);
    }
    if (!running) say(`Stopped. ${summary()}`);
  } finally {
    running = false;
    $("progress").value = 0;
    enable();
  }
  await answer();
}

// The file with the weights as they are now: the numbers of each tensor take their old place.
async function file() {
  if (trained) return trained.file;
  const found = await run("weights", state);
  const result = new Uint8Array((await original).slice(0));
  for (const [name, { offset, bytes: size }] of Object.entries(web.model.tensors)) {
    const { data } = found[manifest.weights.tensors[name]];
    if (data.byteLength !== size) throw Error(`${name} has ${data.byteLength} bytes, not ${size}.`);
    result.set(new Uint8Array(data.buffer, data.byteOffset, size), offset);
  }
  trained = { file: result };
  return result;
}

// The state as one flat file, which jaxonnx.import_step takes.
function flat() {
  const places = Object.entries(manifest.state);
  const result = new Uint8Array(Math.max(...places.map(([, { offset, bytes }]) => offset + bytes)));
  for (const [name, { offset, bytes }] of places) {
    const { data } = state[name];
    result.set(new Uint8Array(data.buffer, data.byteOffset, bytes), offset);
  }
  return result;
}

function save(name, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

async function download() {
  save("trained.onnx", await file());
  say("Downloaded trained.onnx: the network with the weights as they are now.");
}

async function keep() {
  save("trained.bin", flat());
  say("Downloaded trained.bin: the state, which jaxonnx import-step and jaxonnx.average_states take.");
}

// Probabilities of the classes for inputs of the network, by the very file that a download gives.
async function predict(inputs) {
  const text = await file();
  trained.session ??= await ort.InferenceSession.create(
    text, { executionProviders: [device], logSeverityLevel: 3 });
  const { name, shape, dtype, all, size } = pictures;
  const { batch: fixed, output } = web.classes;
  const count = fixed ?? inputs.length;
  const found = [];
  for (let i = 0; i < inputs.length; i += count) {
    const data = new all.constructor(count * size);
    inputs.slice(i, i + count).forEach((input, j) => data.set(input, j * size));
    const feeds = { [name]: new ort.Tensor(dtype, data, [count, ...shape]) };
    const scores = (await trained.session.run(feeds))[output];
    const classes = scores.dims[1];
    for (let j = 0; j < Math.min(count, inputs.length - i); j++)
      found.push(probabilities([...scores.data.slice(j * classes, (j + 1) * classes)]));
  }
  return found;
}

function probabilities(scores) {
  const sum = scores.reduce((a, b) => a + b);
  if (Math.min(...scores) >= 0 && Math.abs(sum - 1) < 1e-3) return scores; // the graph has a Softmax
  const greatest = Math.max(...scores);
  const powers = scores.map((x) => Math.exp(x - greatest));
  const total = powers.reduce((a, b) => a + b);
  return powers.map((x) => x / total);
}

const best = (list) => list.indexOf(Math.max(...list));

// ---- what is shown -----------------------------------------------------------------------------

// Only what does not go on at once is read out.
function say(text, passing = false, bad = false) {
  $("status").setAttribute("aria-live", passing ? "off" : "polite");
  $("status").classList.toggle("bad", bad);
  $("status").textContent = text;
}

const number = (x) => (x == null ? "–" : x.toPrecision(3));
const percent = (x) => (x == null ? "–" : `${(100 * x).toFixed(1)} %`);

function summary() {
  const { training: loss, loss: held, accuracy } = history.at(-1);
  const parts = [];
  if (loss != null) parts.push(`loss ${number(loss)}`);
  if (held != null) parts.push(`held-out loss ${number(held)}`);
  if (accuracy != null) parts.push(`accuracy ${percent(accuracy)}`);
  return parts.join(", ");
}

function enable() {
  for (const id of ["train", "reset", "download", "keep", "device", "epochs"]) $(id).disabled = running;
  $("stop").disabled = !running;
}

function show() {
  const chart = (id, lines, format, top) => plot($(id), lines.map(([name, key]) => ({
    name, points: history.filter((row) => row[key] != null).map((row) => [row.epoch, row[key]]),
  })), format, top);
  chart("loss", [["train", "training"], ["test", "loss"]], (x) => `${Number(x.toPrecision(3))}`);
  chart("accuracy", [["test", "accuracy"]], (x) => `${Math.round(100 * x)} %`, 1);
  $("loss").setAttribute("aria-label", `Loss by epoch: ${summary()}`);
  $("accuracy").setAttribute("aria-label", `Accuracy by epoch: ${percent(history.at(-1).accuracy)}`);
  $("accuracies").hidden = history[0].accuracy == null;
  $("rows").replaceChildren(...history.map((row) => {
    const line = document.createElement("tr");
    for (const text of [row.epoch, number(row.training), number(row.loss), percent(row.accuracy)])
      line.insertCell().textContent = text;
    return line;
  }));
}

// The next number that is easy to read.
function round(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return power * [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((m) => m * power >= x * 0.999);
}

function plot(svg, lines, format, top) {
  const [left, right, up, down] = [46, 350, 8, 165];
  const all = lines.flatMap(({ points }) => points.map(([, y]) => y));
  const step = top ? top / 4 : round(Math.max(...all, 1e-9) / 4);
  const high = 4 * step;
  const last = Math.max(1, history.length - 1);
  const x = (epoch) => left + ((right - left) * epoch) / last;
  const y = (height) => down - ((down - up) * height) / high;
  const made = (tag, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, of] of Object.entries(attributes)) node.setAttribute(name, of);
    node.textContent = text;
    return node;
  };
  const nodes = [];
  for (const height of [0, 1, 2, 3, 4].map((i) => i * step)) {
    nodes.push(made("line", { class: "grid", x1: left, x2: right, y1: y(height), y2: y(height) }));
    nodes.push(made("text", { x: left - 6, y: y(height) + 4, "text-anchor": "end" }, format(height)));
  }
  const every = Math.ceil(last / 6);
  for (let epoch = 0; epoch <= last; epoch += every)
    nodes.push(made("text", { x: x(epoch), y: 184, "text-anchor": "middle" }, `${epoch}`));
  for (const { name, points } of lines) {
    nodes.push(made("polyline", { class: name, points: points.map(([e, v]) => `${x(e)},${y(v)}`).join(" ") }));
    if (points.length) {
      const [e, v] = points.at(-1);
      nodes.push(made("circle", { class: name, cx: x(e), cy: y(v), r: 3.5 }));
    }
  }
  svg.replaceChildren(...nodes);
}

// The held-out examples as pictures, with what the network says of them.
async function examine() {
  if (!web.drawing) return;
  const indices = testing().slice(0, SHOWN);
  const found = (await predict(indices.map((i) => value(pictures, i)))).map(best);
  const labels = columns.find(({ name }) => name === web.classes.labels);
  $("gallery").replaceChildren(...indices.map((i, place) => {
    const is = web.classes.names[Number(value(labels, i)[0])] ?? "none";
    const says = web.classes.names[found[place]];
    const item = document.createElement("li");
    const canvas = document.createElement("canvas");
    canvas.className = "pixels";
    canvas.setAttribute("aria-hidden", "true");
    picture(canvas, value(pictures, i));
    const text = document.createElement("span");
    text.className = is === says ? "right" : "wrong";
    text.textContent = is === says ? `✓ ${says}` : `✗ ${says}, is ${is}`;
    item.append(canvas, text);
    return item;
  }));
}

// ---- drawing -----------------------------------------------------------------------------------

const CELL = 40; // pixels of the board for one of the network's

// Show an input as dark on light, whatever the network takes.
function picture(canvas, input) {
  const { width, height, paper, ink } = web.drawing;
  [canvas.width, canvas.height] = [width, height];
  const pixels = new ImageData(width, height);
  input.forEach((x, i) => {
    const grey = 255 * (1 - Math.min(1, Math.max(0, (x - paper) / (ink - paper))));
    pixels.data.set([grey, grey, grey, 255], 4 * i);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

const pen = () => $("board").getContext("2d", { willReadFrequently: true });

function clear() {
  pen().fillStyle = "#fff";
  pen().fillRect(0, 0, $("board").width, $("board").height);
}

// The drawing as an input: each number is the mean of a square of the board.
function input() {
  const { width, height, paper, ink } = web.drawing;
  const pixels = pen().getImageData(0, 0, width * CELL, height * CELL).data;
  const found = new pictures.all.constructor(width * height);
  for (let row = 0; row < height; row++)
    for (let column = 0; column < width; column++) {
      let sum = 0;
      for (let y = row * CELL; y < (row + 1) * CELL; y++)
        for (let x = column * CELL; x < (column + 1) * CELL; x++)
          sum += 255 - pixels[4 * (y * width * CELL + x)];
      found[row * width + column] = paper + ((ink - paper) * sum) / (255 * CELL * CELL);
    }
  return found;
}

async function answer() {
  if (!web.drawing || running) return;
  const seen = input();
  picture($("seen"), seen);
  const blank = seen.every((x) => x === web.drawing.paper);
  const [shares] = blank ? [web.classes.names.map(() => 0)] : await predict([seen]);
  const order = range(0, shares.length).sort((a, b) => shares[b] - shares[a]);
  $("answer").textContent = blank
    ? "Draw something." : `${web.classes.names[order[0]]} (${percent(shares[order[0]])})`;
  const few = shares.length > 10 ? order.slice(0, 10) : range(0, shares.length);
  $("bars").replaceChildren(...few.flatMap((i) => {
    const [name, bar, share] = ["span", "b", "span"].map((tag) => document.createElement(tag));
    [name.textContent, share.textContent] = [web.classes.names[i], blank ? "" : percent(shares[i])];
    bar.style.width = `${100 * shares[i]}%`;
    return [name, bar, share];
  }));
}

function add() {
  const row = {};
  for (const column of columns) {
    const { name, all, size } = column;
    row[name] = column === pictures ? input() : new all.constructor(size).fill(1);
    if (name === web.classes.labels) row[name][0] = Number($("label").value);
  }
  drawn.push(row);
  about();
  say(`Added a drawing of ${web.classes.names[$("label").value]}: ${drawn.length} drawn by hand.`);
  clear();
  return answer();
}

async function sample() {
  const indices = testing();
  const i = indices[Math.floor(Math.random() * indices.length)];
  const small = document.createElement("canvas");
  picture(small, value(pictures, i));
  pen().imageSmoothingEnabled = false;
  pen().drawImage(small, 0, 0, $("board").width, $("board").height);
  const labels = columns.find(({ name }) => name === web.classes.labels);
  $("label").value = Number(value(labels, i)[0]);
  await answer();
}

// A photograph of a drawing: the greyness of its corners is that of the paper.
async function open(files) {
  if (!files.length) return;
  const image = await createImageBitmap(files[0]);
  const { width, height } = $("board");
  const scale = Math.min(width / image.width, height / image.height);
  const [w, h] = [image.width * scale, image.height * scale];
  clear();
  pen().imageSmoothingEnabled = true;
  pen().drawImage(image, (width - w) / 2, (height - h) / 2, w, h);
  const pixels = pen().getImageData(0, 0, width, height);
  const greys = new Float32Array(width * height);
  greys.forEach((_, i) => {
    const [r, g, b] = pixels.data.subarray(4 * i, 4 * i + 3);
    greys[i] = 0.299 * r + 0.587 * g + 0.114 * b;
  });
  const [x, y] = [Math.ceil((width - w) / 2), Math.ceil((height - h) / 2)];
  const corners = [[x, y], [width - 1 - x, y], [x, height - 1 - y], [width - 1 - x, height - 1 - y]];
  const paper = corners.reduce((sum, [a, b]) => sum + greys[b * width + a], 0) / 4;
  const outside = (i) => Math.floor(i / width) < y || Math.floor(i / width) >= height - y
    || i % width < x || i % width >= width - x;
  const inks = greys.map((grey, i) => (outside(i) ? 0 : Math.abs(grey - paper)));
  const most = inks.reduce((a, b) => Math.max(a, b), 1);
  inks.forEach((ink, i) => pixels.data.set(Array(3).fill(255 * (1 - ink / most)), 4 * i));
  pen().putImageData(pixels, 0, 0);
  await answer();
}

function prepareBoard() {
  const { width, height } = web.drawing;
  const board = $("board");
  [board.width, board.height] = [width * CELL, height * CELL];
  board.parentElement.style.setProperty("--ratio", width / height);
  clear();
  let last = null;
  const place = (event) => [
    (event.offsetX * board.width) / board.clientWidth,
    (event.offsetY * board.height) / board.clientHeight,
  ];
  const stroke = (event) => {
    const next = place(event);
    Object.assign(pen(), {
      lineWidth: CELL * Math.max(1.2, height / 12), lineCap: "round", lineJoin: "round", strokeStyle: "#000",
    });
    pen().beginPath();
    pen().moveTo(...last);
    pen().lineTo(...next);
    pen().stroke();
    last = next;
  };
  board.addEventListener("pointerdown", (event) => {
    board.setPointerCapture(event.pointerId);
    $("cell").classList.remove("shown");
    last = place(event);
    stroke(event);
  });
  board.addEventListener("pointermove", (event) => last && stroke(event));
  for (const end of ["pointerup", "pointercancel"])
    board.addEventListener(end, () => { last = null; handled(answer)(); });
  let [column, row] = [Math.floor(width / 2), Math.floor(height / 2)];
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  board.addEventListener("keydown", (event) => {
    const [dx, dy] = moves[event.key] ?? [0, 0];
    if (event.key === " ") {
      pen().fillStyle = "#000";
      pen().fillRect(column * CELL, row * CELL, CELL, CELL);
    } else if (event.key === "Delete" || event.key === "Backspace") clear();
    else if (!dx && !dy) return;
    event.preventDefault();
    column = Math.min(width - 1, Math.max(0, column + dx));
    row = Math.min(height - 1, Math.max(0, row + dy));
    Object.assign($("cell").style, {
      left: `${(100 * column) / width}%`, top: `${(100 * row) / height}%`,
      width: `${100 / width}%`, height: `${100 / height}%`,
    });
    $("cell").classList.add("shown");
    if (!dx && !dy) handled(answer)();
  });
  $("clear").onclick = handled(() => { clear(); return answer(); });
  $("sample").onclick = handled(sample);
  $("add").onclick = handled(add);
  $("picture").onchange = handled(() => open($("picture").files));
  $("label").replaceChildren(...web.classes.names.map((name, i) => new Option(name, i)));
  $("drawing").hidden = $("held").hidden = false;
}

// ---- the page ----------------------------------------------------------------------------------

// Errors are told in the page; what is asked for while another thing is under way comes after it.
let queue = Promise.resolve();
const handled = (action) => () => {
  queue = queue.then(action).catch((error) => {
    console.error(error);
    say(error.message ?? String(error), false, true);
    enable();
  });
};

function about() {
  const added = drawn.length ? ` and ${drawn.length} drawn by hand` : "";
  $("about").textContent = `${web.examples.count - web.examples.held_out} examples${added} to train with, ` +
    `${web.examples.held_out} held out.${web.inputs ? ` Their inputs: ${KINDS[web.inputs]}.` : ""}`;
}

let original;
handled(async () => {
  manifest = await (await fetched("manifest.json")).json();
  ({ web } = manifest);
  original = shared(web.model.file);
  await readExamples();
  if (await navigator.gpu?.requestAdapter()) {
    Object.assign($("device").querySelector("[value=webgpu]"), { disabled: false, textContent: "WebGPU" });
  }
  await use("wasm");
  about();
  if (web.drawing) prepareBoard();
  await start();
  await answer();
  $("train").onclick = handled(train);
  $("stop").onclick = () => { running = false; };
  $("reset").onclick = handled(async () => { await start(); await answer(); say("As before the training."); });
  $("download").onclick = handled(download);
  $("keep").onclick = handled(keep);
  $("device").onchange = handled(async () => {
    say("Loading…", true);
    await use($("device").value);
    say(`Runs on ${$("device").selectedOptions[0].textContent}.`);
  });
  enable();
  say(`Ready: ${summary()}.`);
})();
