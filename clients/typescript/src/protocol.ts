/** The events of `baton.v1` and its binary frame. No I/O here; `requests.ts` has what a client sends. */

export const SUBPROTOCOL = "baton.v1";
export const VERSION = 1;

/** The status of a sandbox, or of one of its commands. */
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

/** The bytes of a stream that can still be read. */
export interface ByteRange {
  from: number;
  to: number;
}

/** A command as the sandbox knows it. */
export interface ExecView {
  execId: string;
  exec: number;
  running: boolean;
  stdin: number;
  stdout: ByteRange;
  stderr: ByteRange;
  exitCode?: number;
  signal?: number;
  /** The CRC-32 of the accepted bytes of stdin, if the sandbox tells. */
  stdinCrc32?: number;
}

/** A status and its details. */
export interface Update {
  event: "status_update";
  status: Status;
  message?: string;
  /** Why a sandbox was checkpointed or deleted, such as `"idle"`. */
  reason?: string;
  execId?: string;
  exec?: number;
  exitCode?: number;
  signal?: number;
  timedOut?: boolean;
  durationMs?: number;
  checkpointId?: string;
  /** How long the sandbox was paused for a snapshot, or for a checkpoint after which it keeps running. */
  pausedMs?: number;
  snapshot?: string;
  /** `files`, with RUNNING: the sandbox was restarted on the files of its last checkpoint. */
  boot?: string;
  /** With repeated CREATING, RESTORING, CHECKPOINTING and FILESYSTEM_SNAPSHOT_CREATING. */
  progress?: Progress;
  execs?: ExecView[];
}

/** Bytes transferred so far, and bytes in total: 0 if the total is not known. */
export interface Progress {
  done: number;
  total: number;
}

/** What a client needs to attach to a sandbox. */
export interface Identity {
  sandboxId: string;
  sandboxToken: string;
  /** Whether the sandbox is stored; left out if the server does not say. */
  persistent?: boolean;
}

/** The network policy of the sandbox does not allow a connection, or a name. Only a few of many are reported. */
export interface EgressDenied {
  host: string;
  /** Left out if a program only asked for the name. */
  port?: number;
  /** `"policy"` of the sandbox, `"ceiling"` of the server, or what the address is, such as `"private"`. */
  reason: string;
}

export type Event =
  | Update
  | ({ event: "sandbox_id" } & Identity)
  | { event: "stdout" | "stderr"; data: string }
  | { event: "error"; message: string }
  | { event: "hello"; protocol: number; maxFrame: number; maxExecs: number; instance: string }
  | { event: "stdin_ack"; execId: string; offset: number }
  | { event: "output_gap"; execId: string; stream: Output; from: number; to: number }
  | { event: "output_rewound"; execId: string; stream: Output; to: number }
  | { event: "rolled_back"; checkpointId: string; ageMs: number }
  | ({ event: "egress_denied" } & EgressDenied)
  /** The new idle timeout in seconds; `null` for never. */
  | { event: "idle_timeout"; idleTimeout: number | null }
  | { event: "forked"; sandboxes: Identity[] };

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
const range = object({ from: number, to: number });
const view = object(
  { execId: text, exec: number, running: flag, stdin: number, stdout: range, stderr: range },
  { exitCode: number, signal: number, stdinCrc32: number },
);
const identity = object({ sandboxId: text, sandboxToken: text }, { persistent: flag });

const CHECKS: Record<Event["event"], Check> = {
  status_update: object(
    { status: (value) => (STATUSES as readonly unknown[]).includes(value) },
    {
      message: text,
      reason: text,
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
  sandbox_id: identity,
  stdout: object({ data: text }),
  stderr: object({ data: text }),
  error: object({ message: text }),
  hello: object({ protocol: number, maxFrame: number, maxExecs: number, instance: text }),
  stdin_ack: object({ execId: text, offset: number }),
  output_gap: object({ execId: text, stream: output, from: number, to: number }),
  output_rewound: object({ execId: text, stream: output, to: number }),
  rolled_back: object({ checkpointId: text, ageMs: number }),
  egress_denied: object({ host: text, reason: text }, { port: number }),
  idle_timeout: object({ idleTimeout: (value) => value === null || number(value) }),
  forked: object({ sandboxes: list(identity) }),
};

/** An event, or nothing for one that this version does not know. */
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

/** Throws if the message is not such a frame. */
export function decodeChunk(frame: Uint8Array): Chunk {
  if (frame.length < HEADER) throw new RangeError(`a binary message is at least ${HEADER} bytes long`);
  const header = new DataView(frame.buffer, frame.byteOffset, HEADER);
  const stream = STREAMS[header.getUint8(0)];
  if (!stream) throw new RangeError("the first byte of a binary message is 0 (stdin), 1 (stdout) or 2 (stderr)");
  const offset = Number(header.getBigUint64(5));
  return { stream, exec: header.getUint32(1), offset, payload: frame.subarray(HEADER) };
}
