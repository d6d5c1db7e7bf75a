// Checks reports in a headless browser; ci/report-page says how. Speaks the DevTools protocol over a pipe.

import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const WIDTHS = [360, 768, 1440];
const SCHEMES = ["light", "dark"];
const [browser, folder, ...reports] = process.argv.slice(2);

class Browser {
  constructor(program, profile) {
    const flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
      "--disable-background-networking", "--remote-debugging-pipe", `--user-data-dir=${profile}`];
    this.process = spawn(program, flags, { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
    this.process.once("error", error => { console.error(`${program}: ${error.message}`); process.exit(2); });
    this.process.once("exit", () => { for (const { reject } of this.waiting.values()) reject(new Error("the browser ended")); });
    this.waiting = new Map();
    this.listeners = new Set();
    this.last = 0;
    let text = "";
    this.process.stdio[4].setEncoding("utf8").on("data", part => {
      const messages = (text + part).split("\0");
      text = messages.pop();
      for (const message of messages) this.receive(JSON.parse(message));
    });
  }

  receive(message) {
    const call = this.waiting.get(message.id);
    this.waiting.delete(message.id);
    if (!call) for (const listener of this.listeners) listener(message);
    else if (message.error) call.reject(new Error(message.error.message));
    else call.resolve(message.result);
  }

  send(method, params = {}, sessionId = undefined) {
    const id = ++this.last;
    this.process.stdio[3].write(JSON.stringify({ id, method, params, sessionId }) + "\0");
    return new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
  }
}

function thrown({ exception, text }) { return exception?.description ?? text; }

class Page {
  static async open(browser, url) {
    const page = new Page();
    const { targetId } = await browser.send("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await browser.send("Target.attachToTarget", { targetId, flatten: true });
    page.send = (method, params) => browser.send(method, params, sessionId);
    page.close = () => { browser.listeners.delete(page.listener); return browser.send("Target.closeTarget", { targetId }); };
    page.problems = [];
    page.url = url;
    page.listener = message => { if (message.sessionId == sessionId) page.note(message); };
    browser.listeners.add(page.listener);
    for (const domain of ["Page", "Runtime", "Log", "Network"]) await page.send(`${domain}.enable`);
    await page.size(1440, "light");
    const loaded = new Promise(resolve => page.loaded = resolve);
    await page.send("Page.navigate", { url });
    await loaded;
    await page.settle();
    return page;
  }

  note({ method, params }) {
    if (method == "Page.loadEventFired") this.loaded();
    if (method == "Runtime.exceptionThrown") this.problems.push(`exception: ${thrown(params.exceptionDetails)}`);
    if (method == "Runtime.consoleAPICalled" && ["error", "warning", "assert"].includes(params.type))
      this.problems.push(`console: ${params.args.map(arg => arg.value ?? arg.description).join(" ")}`);
    if (method == "Log.entryAdded" && params.entry.level == "error") this.problems.push(`log: ${params.entry.text}`);
    if (method == "Network.requestWillBeSent" && params.request.url != this.url && !/^(data|blob):/.test(params.request.url))
      this.problems.push(`loads ${params.request.url}`);
  }

  size(width, scheme) {
    return Promise.all([
      this.send("Emulation.setDeviceMetricsOverride", { width, height: 900, deviceScaleFactor: 1, mobile: false }),
      this.send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] }),
    ]);
  }

  async value(expression) {
    const { result, exceptionDetails } = await this.send("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
    if (exceptionDetails) throw new Error(thrown(exceptionDetails));
    return result.value;
  }

  // Two frames and `more` milliseconds, so that what a change asks for is drawn.
  settle(more = 30) {
    return this.value(`new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, ${more}))))`);
  }

  async key(key, code) {
    for (const type of ["rawKeyDown", "keyUp"]) {
      await this.send("Input.dispatchKeyEvent", { type, key, code: key, windowsVirtualKeyCode: code });
    }
    await this.settle();
  }

  async mouse(type, x, y, { buttons = 0, clickCount = 1 } = {}) {
    const button = type == "mouseMoved" && !buttons ? "none" : "left";
    await this.send("Input.dispatchMouseEvent", { type, x, y, button, buttons, clickCount });
  }

  async click(x, y, clickCount = 1) {
    await this.mouse("mousePressed", x, y, { buttons: 1, clickCount });
    await this.mouse("mouseReleased", x, y, { clickCount });
    await this.settle();
  }

  // The middle of the first element that `selector` finds, after it was scrolled to the middle of the window.
  async place(selector) {
    return this.value(`(() => {
      const found = document.querySelector(${JSON.stringify(selector)});
      found.scrollIntoView({ block: "center" });
      const { left, top, width, height } = found.getBoundingClientRect();
      return { left, top, width, height, x: left + width / 2, y: top + height / 2 };
    })()`);
  }

  text(id) { return this.value(`document.getElementById("${id}").innerText`); }

  moment() { return this.value(`document.getElementById("moment").valueAsNumber`); }

  check(held, what) { if (!held) this.problems.push(what); }
}

async function checkSlider(page, last) {
  await page.value(`(() => {
    const slider = document.getElementById("moment");
    slider.focus();
    slider.value = 0;
    slider.dispatchEvent(new Event("input"));
  })()`);
  await page.settle();
  page.check(await page.moment() == 0, "the slider does not choose the first moment");
  const first = await page.text("status");
  await page.key("ArrowRight", 39);
  page.check(await page.moment() == 1, "the right arrow key on the slider does not choose the next moment");
  await page.key("End", 35);
  page.check(await page.moment() == last, "the End key on the slider does not choose the last moment");
  page.check(await page.text("status") != first, "the line of the selected moment does not follow the slider");
  await page.value("document.activeElement.blur()");
  await page.key("ArrowLeft", 37);
  page.check(await page.moment() == last - 1, "the left arrow key does not choose the moment before");
}

async function checkPointer(page, data) {
  const area = await page.place("#memory-chart .u-over");
  await page.mouse("mouseMoved", area.left + area.width * 0.3, area.y);
  await page.settle();
  const pointed = await page.value(`document.querySelector("#memory-readout tbody td").textContent`);
  page.check(/\d/.test(pointed), "the table below the chart has no value for the place under the pointer");
  await page.click(area.left + area.width * 0.3, area.y);
  const { at, events } = data.buckets;
  const moment = await page.moment();
  const distances = at.map(event => Math.abs(event - 0.3 * events));
  page.check(distances[moment] <= Math.min(...distances) + 0.01 * events, "a click into the chart does not choose the nearest moment");
  const line = await page.place("#memory-chart .moment");
  const wanted = area.left + area.width * at[moment] / events;
  page.check(Math.abs(line.x - wanted) < 2, "the line of the moment is in another place than the moment");
}

async function checkZoom(page) {
  const whole = await page.text("zoom-range");
  const area = await page.place("#memory-chart .u-over");
  const [from, to] = [0.25, 0.6].map(share => area.left + area.width * share);
  const before = await page.moment();
  await page.mouse("mouseMoved", from, area.y);
  await page.mouse("mousePressed", from, area.y, { buttons: 1 });
  for (let i = 1; i <= 5; i++) await page.mouse("mouseMoved", from + (to - from) * i / 5, area.y, { buttons: 1 });
  await page.mouse("mouseReleased", to, area.y);
  await page.settle();
  page.check(await page.text("zoom-range") != whole, "a drag does not zoom");
  page.check(await page.moment() == before, "a drag chooses a moment");
  await page.value(`document.getElementById("zoom-reset").click()`);
  await page.settle();
  page.check(await page.text("zoom-range") == whole, "the button does not reset the zoom");
  await page.value(`document.getElementById("zoom-in").click()`);
  await page.settle();
  page.check(await page.text("zoom-range") != whole, "the button does not zoom in");
  await page.click(area.x, area.y, 1);
  await page.click(area.x, area.y, 2);
  page.check(await page.text("zoom-range") == whole, "a double click does not reset the zoom");
}

// Two fingers that part zoom in, and that meet zoom out; one finger moves what is shown.
async function checkTouch(page) {
  await page.send("Emulation.setTouchEmulationEnabled", { enabled: true, maxTouchPoints: 2 });
  await page.value(`document.getElementById("zoom-reset").click()`);
  await page.settle();
  const whole = await page.text("zoom-range");
  const area = await page.place("#memory-chart .u-over");
  const touch = async (...steps) => {
    const points = shares => shares.map((share, id) => ({ x: area.left + area.width * share, y: area.y, id }));
    for (const [i, shares] of steps.entries()) {
      await page.send("Input.dispatchTouchEvent", { type: i ? "touchMove" : "touchStart", touchPoints: points(shares) });
    }
    await page.send("Input.dispatchTouchEvent", { type: "touchEnd", touchPoints: [] });
    await page.settle();
    return page.text("zoom-range");
  };
  const zoomed = await touch([0.4, 0.6], [0.3, 0.7], [0.2, 0.8]);
  page.check(zoomed != whole, "two fingers do not zoom in");
  const moved = await touch([0.5], [0.4], [0.3]);
  page.check(moved != zoomed && moved != whole, "a finger does not move a zoomed chart");
  page.check(await touch([0.1, 0.9], [0.3, 0.7], [0.45, 0.55]) == whole, "two fingers do not zoom out");
  await page.send("Emulation.setTouchEmulationEnabled", { enabled: false });
}

async function checkChoices(page, data) {
  for (const id of ["memory-chooser", "alive-chooser"]) {
    const inputs = await page.value(`document.querySelectorAll("#${id} input").length`);
    for (let i = inputs - 1; i >= 0; i--) {
      await page.value(`document.querySelectorAll("#${id} input")[${i}].click()`);
      await page.settle();
      page.check(await page.value(`document.querySelectorAll("#${id} input")[${i}].checked`), `choice ${i} of ${id} cannot be chosen`);
    }
  }
  const rows = await page.value(`document.querySelectorAll("#compare-table tbody tr").length`);
  const empty = await page.value(`[...document.querySelectorAll("#compare-table thead th")].slice(1).map((_, i) =>
    [...document.querySelectorAll("#compare-table tbody tr")].every(row => row.children[i + 1].innerText == "–")).includes(true)`);
  page.check(!empty, "the table has a column without any value");
  page.check(rows == data.allocators.length, `the table has ${rows} allocators instead of ${data.allocators.length}`);
}

async function checkGroups(page) {
  if (await page.value(`document.querySelector("#alive-list summary") == null`)) return;
  await page.value(`document.querySelector("#alive-list summary").focus()`);
  await page.key("Enter", 13);
  await page.send("Input.dispatchKeyEvent", { type: "char", text: "\r" });
  await page.settle();
  page.check(await page.value(`document.querySelector("#alive-list details").open`), "the Enter key does not open a group");
  await page.value(`document.querySelector("#alive-list details").open = false`);
}

async function checkLegend(page) {
  if (await page.value(`document.querySelector("#alive-legend button") == null`)) return;
  const pressed = () => page.value(`document.querySelector("#alive-legend button").ariaPressed`);
  for (const wanted of ["false", "true"]) {
    await page.value(`document.querySelector("#alive-legend button").click()`);
    await page.settle();
    page.check(await pressed() == wanted, "a click on the legend does not hide and show a group");
  }
}

async function checkMap(page, data) {
  if (!data.allocators[0]?.space?.rows.length) return;
  const map = await page.place("#space-map canvas");
  await page.mouse("mouseMoved", map.left + 90, map.top + 6);
  await page.settle();
  const told = await page.value(`document.querySelector("#space-map .told").textContent`);
  page.check(/ to .*: /.test(told), "the map does not tell of the cell under the pointer");
  const whole = await page.place("#overview canvas");
  const line = () => page.value(`document.querySelector("#overview .moment").style.left`);
  const before = await line();
  for (const share of [0.95, 0.2]) await page.click(whole.left + whole.width * share, whole.y);
  if (data.allocators[0].space.buckets.length > 3)
    page.check(await line() != before, "a click into the whole run does not choose a moment");
}

async function shoot(page, name) {
  for (const width of WIDTHS) {
    for (const scheme of SCHEMES) {
      await page.size(width, scheme);
      await page.settle(250);
      const [inside, outside] = await page.value("scrollTo(0, 0), [document.documentElement.scrollWidth, innerWidth]");
      page.check(inside <= outside, `scrolls sideways at ${width} pixels: ${inside}`);
      const narrowest = await page.value(`Math.min(...[...document.querySelectorAll("#compare-table tbody th")].map(th => th.clientWidth))`);
      page.check(narrowest >= 150, `the names of allocators have no room at ${width} pixels: ${narrowest}`);
      const { data } = await page.send("Page.captureScreenshot", { format: "png", captureBeyondViewport: true });
      writeFileSync(join(folder, `${name}-${width}-${scheme}.png`), Buffer.from(data, "base64"));
    }
  }
}

// The picture of README: memory over time, and what lies where.
async function shootPicture(page, name) {
  await page.size(960, "light");
  await page.settle(250);
  await page.value(`document.getElementById("to-peak").click();
    for (const other of document.querySelectorAll("section, footer, .bar, .hint"))
    other.hidden = !["memory", "space"].includes(other.id);
    for (const part of ["head", "whole-run"]) document.getElementById(part).hidden = true;`);
  await page.settle(250);
  const [width, height] = await page.value("scrollTo(0, 0), [innerWidth, document.getElementById('body').offsetHeight]");
  const clip = { x: 0, y: 0, width, height, scale: 1 };
  const { data } = await page.send("Page.captureScreenshot", { format: "png", captureBeyondViewport: true, clip });
  writeFileSync(join(folder, `${name}.png`), Buffer.from(data, "base64"));
}

async function checkReport(browser, report) {
  const page = await Page.open(browser, pathToFileURL(resolve(report)).href);
  try {
    const [data] = JSON.parse(await page.value(`document.getElementById("data").textContent`));
    const name = basename(report).replace(/\.html?$/, "");
    page.check((await page.text("head")).startsWith(data.title || "Report"), "the heading does not begin with the title");
    page.check((await page.text("head")).includes("What ran out"), "the answers are not in the header");
    const last = data.buckets.n - 1;
    if (last >= 0) page.check(await page.moment() == data.moment.bucket, "the refusal or peak is not selected at first");
    await shoot(page, name);
    await page.size(1440, "light");
    await page.settle(250);
    if (last > 1) {
      await checkSlider(page, last);
      await checkPointer(page, data);
      await checkZoom(page);
      await checkTouch(page);
    }
    await checkChoices(page, data);
    if (last >= 0) {
      await checkGroups(page);
      await checkLegend(page);
      await checkMap(page, data);
    }
    if (last >= 0) await shootPicture(page, name);
  } catch (error) {
    page.problems.push(error.stack);
  }
  await page.close();
  for (const problem of new Set(page.problems)) console.error(`${report}: ${problem}`);
  if (!page.problems.length) console.log(`${report}: ok`);
  return page.problems.length == 0;
}

mkdirSync(folder, { recursive: true });
const profile = mkdtempSync(join(tmpdir(), "report-page-"));
process.on("exit", () => rmSync(profile, { recursive: true, force: true, maxRetries: 5, retryDelay: 100 }));
const chromium = new Browser(browser, profile);
setTimeout(() => {
  console.error("the browser takes too long");
  chromium.process.kill();
  process.exit(1);
}, 60_000 * reports.length).unref();
let good = true;
for (const report of reports) good = await checkReport(chromium, report) && good;
const ended = new Promise(resolve => chromium.process.once("exit", resolve));
chromium.send("Browser.close").catch(() => {});
await ended;
process.exit(good ? 0 : 1);
