// The page while `--watch` serves it: request the data again, and draw them in place.

const POLL_MS = 1000;
const TIMEOUT_MS = 60000; // the first reading of many runs takes long
const mark = make("span", { id: "live", class: "badge no" }, "live");
byId("status").append(mark);
let etag = null;
let isConnected = true;
let isPolling = false;
/** When a file of the runs last changed, by the clock of this machine: milliseconds. */
let changedAt = null;

/** Seconds, minutes or hours as text. */
function durationText(seconds) {
  const [unit, size] = seconds < 120 ? ["s", 1] : seconds < 7200 ? ["min", 60] : ["h", 3600];
  return `${Math.floor(seconds / size)} ${unit}`;
}

function showMark() {
  const age = changedAt === null ? "" : ` · last record ${durationText((Date.now() - changedAt) / 1000)} ago`;
  mark.textContent = `${isConnected ? "live" : "not connected"}${age}${DATA.error ? ` · ${DATA.error}` : ""}`;
  mark.className = `badge ${isConnected ? (DATA.error ? "bad" : "yes") : "bad"}`;
}

/** Request the data. The clocks of two machines may differ, so the age of the records is by the server's clock. */
async function request() {
  const response = await fetch("data", {
    cache: "no-store",
    headers: etag ? { "If-None-Match": etag } : {},
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (!response.ok && response.status !== 304) throw new Error(response.statusText);
  const timeOf = (name) => Date.parse(response.headers.get(name));
  changedAt = Date.now() - Math.max(0, timeOf("Date") - timeOf("Last-Modified"));
  if (response.status === 304) return null;
  const data = await response.json();
  etag = response.headers.get("ETag");
  return data;
}

async function poll() {
  // A page that nobody sees asks for nothing.
  if (isPolling || document.hidden || document.documentElement.dataset.ready !== "yes") return;
  isPolling = true;
  try {
    const data = await request().finally(() => (isPolling = false));
    isConnected = true;
    // Another command may serve another page at this address.
    if (data && (data.command !== DATA.command || data.version !== DATA.version)) location.reload();
    else if (data) {
      useData(data);
      redraw();
    }
  } catch (error) {
    isConnected = false;
    if (!(error instanceof TypeError || error instanceof DOMException)) console.error(error);
  }
  showMark();
}

setInterval(poll, POLL_MS);
setInterval(showMark, 1000);
document.addEventListener("visibilitychange", poll);
