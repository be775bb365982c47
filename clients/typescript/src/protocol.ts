/** The words of `baton.v1`: requests out, events in, and the binary frame. No I/O here. */

export const SUBPROTOCOL = "baton.v1";
export const VERSION = 1;

/** What a sandbox says of itself. */
export const STATUSES = [
  "SANDBOX_CREATING",
  "SANDBOX_RUNNING",
  "SANDBOX_NOT_FOUND",
  "SANDBOX_IN_USE",
  "SANDBOX_CREATION_ERROR",
  "SANDBOX_EXECUTION_RUNNING",
  "SANDBOX_EXECUTION_DONE",
  "SANDBOX_EXECUTION_ERROR",
  "SANDBOX_EXECUTION_IN_PROGRESS_ERROR",
  "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR",
  "SANDBOX_EXECUTION_FORCE_KILLED",
  "SANDBOX_EXECUTION_FORCE_KILL_ERROR",
  "SANDBOX_STDIN_ERROR",
  "SANDBOX_CHECKPOINTING",
  "SANDBOX_CHECKPOINTED",
  "SANDBOX_CHECKPOINT_ERROR",
  "SANDBOX_RESTORING",
  "SANDBOX_RESTORE_ERROR",
  "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING",
  "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED",
  "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR",
  "SANDBOX_DELETING",
  "SANDBOX_DELETED",
  "SANDBOX_KILLING",
  "SANDBOX_KILLED",
  "SANDBOX_KILL_ERROR",
  "SANDBOX_LOCK_ACQUIRING",
  "SANDBOX_LOCK_ACQUIRED",
  "SANDBOX_LOCK_RELEASE_REQUESTED",
  "SANDBOX_LOCK_RENEWAL_ERROR",
  "SANDBOX_LOCK_RELEASING",
  "SANDBOX_LOCK_RELEASED",
  "SANDBOX_PAUSED",
  "SANDBOX_PERMISSION_DENIAL_ERROR",
  "SANDBOX_ERROR",
] as const;
export type Status = (typeof STATUSES)[number];

export type Output = "stdout" | "stderr";
export const OUTPUTS: readonly Output[] = ["stdout", "stderr"];

// Events.

/** Which bytes of a stream can still be had. */
export interface Kept {
  from: number;
  to: number;
}

/** A command as the sandbox knows it. */
export interface ExecView {
  execId: string;
  exec: number;
  running: boolean;
  stdin: number;
  stdout: Kept;
  stderr: Kept;
  exitCode?: number;
  signal?: number;
}

/** A status and whatever belongs to it. */
export interface Update {
  event: "status_update";
  status: Status;
  message?: string;
  execId?: string;
  exec?: number;
  exitCode?: number;
  signal?: number;
  timedOut?: boolean;
  durationMs?: number;
  checkpointId?: string;
  /** For how long the sandbox stood still, with a snapshot or a checkpoint after which it runs on. */
  pausedMs?: number;
  snapshot?: string;
  /** `files`, with RUNNING: it was started anew on the files of its last checkpoint. */
  boot?: string;
  /** How far it has come, with CREATING, RESTORING, CHECKPOINTING and FILESYSTEM_SNAPSHOT_CREATING said again. */
  progress?: Progress;
  execs?: ExecView[];
}

/** Bytes done, and bytes in all: 0 if nobody knows. */
export interface Progress {
  done: number;
  total: number;
}

/** How to come back to a sandbox. */
export interface Found {
  sandboxId: string;
  sandboxToken: string;
}

export type Event =
  | Update
  | ({ event: "sandbox_id" } & Found)
  | { event: "stdout" | "stderr"; data: string }
  | { event: "error"; message: string }
  | { event: "hello"; protocol: number; maxFrame: number; maxExecs: number; instance: string }
  | { event: "stdin_ack"; execId: string; offset: number }
  | { event: "output_gap"; execId: string; stream: Output; from: number; to: number }
  | { event: "output_rewound"; execId: string; stream: Output; to: number }
  | { event: "rolled_back"; checkpointId: string; ageMs: number }
  | { event: "forked"; sandboxes: Found[] };

type Check = (value: unknown) => boolean;
const text: Check = (value) => typeof value === "string";
const number: Check = (value) => typeof value === "number";
const flag: Check = (value) => typeof value === "boolean";
const output: Check = (value) => value === "stdout" || value === "stderr";
const object = (fields: Record<string, Check>, rest: Record<string, Check> = {}): Check => (value) => {
  if (typeof value !== "object" || value === null) return false;
  const given = value as Record<string, unknown>;
  const all = Object.entries(fields).every(([name, check]) => check(given[name]));
  return all && Object.entries(rest).every(([name, check]) => given[name] === undefined || check(given[name]));
};
const list = (check: Check): Check => (value) => Array.isArray(value) && value.every(check);
const kept = object({ from: number, to: number });
const view = object(
  { execId: text, exec: number, running: flag, stdin: number, stdout: kept, stderr: kept },
  { exitCode: number, signal: number },
);
const found = object({ sandboxId: text, sandboxToken: text });

const CHECKS: Record<Event["event"], Check> = {
  status_update: object(
    { status: (value) => (STATUSES as readonly unknown[]).includes(value) },
    {
      message: text,
      execId: text,
      exec: number,
      exitCode: number,
      signal: number,
      timedOut: flag,
      durationMs: number,
      checkpointId: text,
      pausedMs: number,
      snapshot: text,
      boot: text,
      progress: object({ done: number, total: number }),
      execs: list(view),
    },
  ),
  sandbox_id: found,
  stdout: object({ data: text }),
  stderr: object({ data: text }),
  error: object({ message: text }),
  hello: object({ protocol: number, maxFrame: number, maxExecs: number, instance: text }),
  stdin_ack: object({ execId: text, offset: number }),
  output_gap: object({ execId: text, stream: output, from: number, to: number }),
  output_rewound: object({ execId: text, stream: output, to: number }),
  rolled_back: object({ checkpointId: text, ageMs: number }),
  forked: object({ sandboxes: list(found) }),
};

/** An event, or nothing for what a newer server says and this version does not know. */
export function parse(json: string): Event | undefined {
  let value: unknown;
  try {
    value = camel(JSON.parse(json));
  } catch {
    return undefined;
  }
  if (typeof value !== "object" || value === null) return undefined;
  const { event } = value as Event;
  return Object.hasOwn(CHECKS, event) && CHECKS[event](value) ? (value as Event) : undefined;
}

function camel(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(camel);
  if (typeof value !== "object" || value === null) return value;
  const rename = (name: string) => name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [rename(name), camel(inner)]));
}

// Requests.

export type Request = Record<string, unknown>;

/** Without what was not given: the server's defaults are its own. */
function only(fields: Request): Request {
  const isGiven = (value: unknown) =>
    value !== undefined &&
    value !== false &&
    value !== null &&
    !(typeof value === "object" && !Array.isArray(value) && Object.keys(value).length === 0);
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => isGiven(value)));
}

const seconds = (ms: number | undefined) => (ms === undefined ? undefined : ms / 1000);

/** What a sandbox may have at most; what is left out is as the server has it. */
export interface Limits {
  /** Of all its commands together: bytes, or a text such as `"512MiB"`. */
  memory?: number | string;
  cpus?: number;
  /** Processes and threads at one time. */
  pids?: number;
  /** Written to its files: bytes, or a text such as `"1GiB"`. */
  disk?: number | string;
  /** Open files of one process. */
  files?: number;
}

export interface Config {
  /** Deleted after so much time without work; `null` for never. */
  idleTimeoutMs?: number | null;
  enableCheckpoint?: boolean;
  enableSandboxHandoff?: boolean;
  enableIdleTimeoutAutoCheckpoint?: boolean;
  filesystemSnapshotName?: string;
  labels?: Record<string, string>;
  env?: Record<string, string>;
  cwd?: string;
  ttlMs?: number;
  onIncompatible?: "fail" | "files";
  fromCheckpoint?: string;
  sourceToken?: string;
  limits?: Limits;
}

export function config(wanted: Config): Request {
  const request = only({
    enable_checkpoint: wanted.enableCheckpoint,
    filesystem_snapshot_name: wanted.filesystemSnapshotName,
    labels: wanted.labels,
    env: wanted.env,
    cwd: wanted.cwd,
    ttl: seconds(wanted.ttlMs),
    on_incompatible: wanted.onIncompatible,
    from_checkpoint: wanted.fromCheckpoint,
    source_token: wanted.sourceToken,
    limits: wanted.limits,
  });
  // These two are implied by `enable_checkpoint`, so `false` is a value.
  if (wanted.enableSandboxHandoff !== undefined) request["enable_sandbox_handoff"] = wanted.enableSandboxHandoff;
  if (wanted.enableIdleTimeoutAutoCheckpoint !== undefined)
    request["enable_idle_timeout_auto_checkpoint"] = wanted.enableIdleTimeoutAutoCheckpoint;
  // Here `null` is a value: never.
  if (wanted.idleTimeoutMs !== undefined) request["idle_timeout"] = wanted.idleTimeoutMs && wanted.idleTimeoutMs / 1000;
  return request;
}

export interface Start {
  execId: string;
  argv?: readonly string[];
  language?: string;
  code?: string;
  env?: Record<string, string>;
  cwd?: string;
  user?: string;
  stdin?: boolean;
  pty?: { cols: number; rows: number };
  timeoutMs?: number;
}

export function exec(start: Start): Request {
  const { argv, language, code, env, cwd, user, stdin, pty } = start;
  const what = argv ? { argv } : { language, code };
  return { action: "exec", exec_id: start.execId, ...what, ...only({ env, cwd, user, stdin, pty, timeout: seconds(start.timeoutMs) }) };
}

interface FileStart {
  execId: string;
  path: string;
  user?: string | undefined;
  cwd?: string | undefined;
  timeoutMs?: number | undefined;
}

function fileWork(action: string, start: FileStart, fields: Request): Request {
  const { execId: exec_id, path, user, cwd, timeoutMs } = start;
  return { action, exec_id, path, ...only({ ...fields, user, cwd, timeout: seconds(timeoutMs) }) };
}

export function readFile(start: FileStart & { offset?: number | undefined; length?: number | undefined; archive?: boolean }): Request {
  const { offset, length, archive } = start;
  return fileWork("read_file", start, { offset: offset || undefined, length, archive });
}

export function writeFile(
  start: FileStart & { mode?: number | undefined; mtimeMs?: number | undefined; size?: number | undefined; archive?: boolean },
): Request {
  const { mode, mtimeMs: mtime_ms, size, archive } = start;
  return fileWork("write_file", start, { mode, mtime_ms, size, archive });
}

export function listFiles(start: FileStart & { depth?: number | undefined }): Request {
  return fileWork("list_files", start, { depth: start.depth });
}

export function stdin(execId: string, data = "", how: { offset?: number; eof?: boolean; encoding?: "base64" } = {}): Request {
  return { event: "stdin", exec_id: execId, data, ...only({ ...how }) };
}

export function killProcess(execId: string): Request {
  return { action: "kill_process", exec_id: execId };
}

export function signal(execId: string, name: string): Request {
  return { action: "signal", exec_id: execId, signal: name };
}

export function resize(execId: string, cols: number, rows: number): Request {
  return { action: "resize", exec_id: execId, cols, rows };
}

export function checkpoint(how: { live?: boolean; keepRunning?: boolean }): Request {
  return { action: "checkpoint", ...only({ live: how.live, keep_running: how.keepRunning }) };
}

export function snapshot(name: string, full = false): Request {
  return { action: "snapshot_filesystem", name, ...only({ full }) };
}

export function fork(count: number): Request {
  return { action: "fork", count };
}

export function handoff(): Request {
  return { action: "handoff" };
}

export function killSandbox(): Request {
  return { action: "kill_sandbox" };
}

/** How far the two streams of a command were received. */
export interface Offsets {
  stdout: number;
  stderr: number;
}

/** With `peek` output is looked at and not taken. */
export function reconnect(offsets: Record<string, Offsets>, peek?: boolean): Request {
  return { action: "reconnect", ...only({ offsets, peek: peek || undefined }) };
}

export function ack(execId: string, offsets: Offsets): Request {
  return { action: "ack", exec_id: execId, ...offsets };
}

// The binary frame: stream, number of the command, offset, then the bytes.

export const HEADER = 13;
const STREAMS = ["stdin", "stdout", "stderr"] as const;

export interface Chunk {
  stream: (typeof STREAMS)[number];
  exec: number;
  offset: number;
  payload: Uint8Array;
}

export function encodeChunk(chunk: Chunk): Uint8Array {
  const frame = new Uint8Array(HEADER + chunk.payload.length);
  const header = new DataView(frame.buffer);
  header.setUint8(0, STREAMS.indexOf(chunk.stream));
  header.setUint32(1, chunk.exec);
  header.setBigUint64(5, BigInt(chunk.offset));
  frame.set(chunk.payload, HEADER);
  return frame;
}

/** Throws for what is no such frame. */
export function decodeChunk(frame: Uint8Array): Chunk {
  if (frame.length < HEADER) throw new RangeError(`a binary message is at least ${HEADER} bytes long`);
  const header = new DataView(frame.buffer, frame.byteOffset, HEADER);
  const stream = STREAMS[header.getUint8(0)];
  if (!stream) throw new RangeError("the first byte of a binary message is 0 (stdin), 1 (stdout) or 2 (stderr)");
  const offset = Number(header.getBigUint64(5));
  return { stream, exec: header.getUint32(1), offset, payload: frame.subarray(HEADER) };
}
