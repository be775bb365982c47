/** The requests of `baton.v1`. No I/O here. */

export type Request = Record<string, unknown>;

/** Leaves out what was not given: the server has its own defaults. */
function given(fields: Request): Request {
  const isGiven = (value: unknown) =>
    value !== undefined &&
    value !== false &&
    value !== null &&
    !(typeof value === "object" && !Array.isArray(value) && Object.keys(value).length === 0);
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => isGiven(value)));
}

const seconds = (ms: number | undefined) => (ms === undefined ? undefined : ms / 1000);

/** The most a sandbox may use. The server has its own defaults for the rest. */
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

export interface Config extends Limits {
  /**
   * Store the sandbox, so that it can move between instances and is checkpointed when it is idle. By default it is stored if
   * the server has storage. `await using` kills persistent sandboxes, too.
   */
  persistent?: boolean;
  /** How long it may be idle: no command runs, and no client sends a request. `null` for never. By default the server chooses. */
  idleTimeoutMs?: number | null;
  /** How long it lives at most. */
  ttlMs?: number;
  /**
   * Where its programs may connect to: `"none"`, `"any"`, or destinations such as `"index.example.org:443"`, `"*.example.net"` or
   * `"203.0.113.0/24:5432"`. By default the server chooses.
   */
  egress?: "none" | "any" | readonly string[];
  /** Environment variables of all its commands. */
  env?: Record<string, string>;
  /** The directory in which its commands start. */
  cwd?: string;
  /** Names and values by which it can be found on the server. */
  labels?: Record<string, string>;
  /** Start from the files of this snapshot. */
  filesystemSnapshotName?: string;
  /** Start from this checkpoint of another sandbox, whose token is `sourceToken`. */
  fromCheckpoint?: string;
  sourceToken?: string;
  /** `"files"` restarts on the files of the last checkpoint if its memory cannot be restored. */
  onIncompatible?: "fail" | "files";
  /** The five limits as one object. */
  limits?: Limits;
  /** One of the older, separate switches of `persistent`. */
  enableCheckpoint?: boolean;
  /** One of the older, separate switches of `persistent`. */
  enableSandboxHandoff?: boolean;
  /** One of the older, separate switches of `persistent`. */
  enableIdleTimeoutAutoCheckpoint?: boolean;
}

export function config(wanted: Omit<Config, "persistent"> & { persistent?: boolean | "auto" }): Request {
  const { memory, cpus, pids, disk, files } = wanted;
  const request = given({
    filesystem_snapshot_name: wanted.filesystemSnapshotName,
    labels: wanted.labels,
    env: wanted.env,
    cwd: wanted.cwd,
    ttl: seconds(wanted.ttlMs),
    on_incompatible: wanted.onIncompatible,
    from_checkpoint: wanted.fromCheckpoint,
    source_token: wanted.sourceToken,
    network: given({ egress: wanted.egress }),
    limits: { ...wanted.limits, ...given({ memory, cpus, pids, disk, files }) },
  });
  const flags = {
    persistent: wanted.persistent,
    enable_checkpoint: wanted.enableCheckpoint,
    enable_sandbox_handoff: wanted.enableSandboxHandoff,
    enable_idle_timeout_auto_checkpoint: wanted.enableIdleTimeoutAutoCheckpoint,
  };
  // `false` is a value here, because none of these is off by default in every case.
  for (const [name, value] of Object.entries(flags)) if (value !== undefined) request[name] = value;
  // `null` is a value here: never.
  if (wanted.idleTimeoutMs !== undefined) request["idle_timeout"] = wanted.idleTimeoutMs && wanted.idleTimeoutMs / 1000;
  return request;
}

export interface ExecRequest {
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

export function exec(start: ExecRequest): Request {
  const { argv, language, code, env, cwd, user, stdin, pty } = start;
  const what = argv ? { argv } : { language, code };
  return { action: "exec", exec_id: start.execId, ...what, ...given({ env, cwd, user, stdin, pty, timeout: seconds(start.timeoutMs) }) };
}

interface FileRequest {
  execId: string;
  path: string;
  user?: string | undefined;
  cwd?: string | undefined;
  timeoutMs?: number | undefined;
}

function fileRequest(action: string, start: FileRequest, fields: Request): Request {
  const { execId: exec_id, path, user, cwd, timeoutMs } = start;
  return { action, exec_id, path, ...given({ ...fields, user, cwd, timeout: seconds(timeoutMs) }) };
}

export function readFile(start: FileRequest & { offset?: number | undefined; length?: number | undefined; archive?: boolean }): Request {
  const { offset, length, archive } = start;
  return fileRequest("read_file", start, { offset: offset || undefined, length, archive });
}

export function writeFile(
  start: FileRequest & { mode?: number | undefined; mtimeMs?: number | undefined; size?: number | undefined; archive?: boolean },
): Request {
  const { mode, mtimeMs: mtime_ms, size, archive } = start;
  return fileRequest("write_file", start, { mode, mtime_ms, size, archive });
}

export function listFiles(start: FileRequest & { depth?: number | undefined }): Request {
  return fileRequest("list_files", start, { depth: start.depth });
}

export function removeFile(start: FileRequest & { recursive?: boolean | undefined }): Request {
  return fileRequest("remove_file", start, { recursive: start.recursive });
}

export function renameFile(start: FileRequest & { to: string }): Request {
  return fileRequest("rename_file", start, { to: start.to });
}

export function makeDirectory(start: FileRequest & { parents?: boolean | undefined; mode?: number | undefined }): Request {
  return fileRequest("make_directory", start, { parents: start.parents, mode: start.mode });
}

export function watchFiles(start: FileRequest & { recursive?: boolean | undefined }): Request {
  return fileRequest("watch_files", start, { recursive: start.recursive });
}

export function stdin(execId: string, data = "", how: { offset?: number; eof?: boolean; encoding?: "base64" } = {}): Request {
  return { event: "stdin", exec_id: execId, data, ...given({ ...how }) };
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
  return { action: "checkpoint", ...given({ live: how.live, keep_running: how.keepRunning }) };
}

export function snapshot(name: string, full = false): Request {
  return { action: "snapshot_filesystem", name, ...given({ full }) };
}

export function fork(count: number): Request {
  return { action: "fork", count };
}

export function handoff(): Request {
  return { action: "handoff" };
}

export function setIdleTimeout(idleTimeoutMs: number | null): Request {
  return { action: "set_idle_timeout", idle_timeout: idleTimeoutMs === null ? null : idleTimeoutMs / 1000 };
}

export function killSandbox(): Request {
  return { action: "kill_sandbox" };
}

/** How much of the two output streams of a command was received. */
export interface Offsets {
  stdout: number;
  stderr: number;
}

/** With `peek` the output stays available to the next client. */
export function reconnect(offsets: Record<string, Offsets>, peek?: boolean): Request {
  return { action: "reconnect", ...given({ offsets, peek: peek || undefined }) };
}

export function ack(execId: string, offsets: Offsets): Request {
  return { action: "ack", exec_id: execId, ...offsets };
}
