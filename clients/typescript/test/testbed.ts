/** The test bed of `clients/suite`, from TypeScript. */

import { type ChildProcess, spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const path = (name: string) => fileURLToPath(new URL(`../../suite/${name}`, import.meta.url));

export interface Case {
  name: string;
  argv?: string[];
  code?: string;
  language?: string;
  options?: { env?: Record<string, string>; cwd?: string; user?: string; stdin?: string; pty?: [number, number]; timeout?: number };
  stdout?: string;
  stderr?: string;
  exit_code?: number | null;
  signal?: number;
  timed_out?: boolean;
}
type Sizes = Record<"output" | "cuts" | "input" | "input_cuts" | "file" | "file_cuts", number>;
export const CASES: { execs: Case[]; refused: Case[]; scenarios: string[]; sizes: Record<string, Sizes> } = JSON.parse(
  readFileSync(path("cases.json"), "utf8"),
);
export const SIZES = CASES.sizes[process.env["BATON_TIER"] ?? "quick"] as Sizes;

/** Of every server of the test bed. */
export const ADMIN_KEY = "the-admin-key-of-the-test-bed";

type Answer = Record<string, unknown>;

export class Proxy {
  readonly url: string;
  #testbed: Testbed;
  #number: number;

  constructor(testbed: Testbed, number: number, address: string) {
    this.#testbed = testbed;
    this.#number = number;
    this.url = `ws://${address}`;
  }

  /** Sets network conditions; resolves to how many connections there were, and how many were cut. */
  async network(conditions: Record<string, unknown> = {}): Promise<{ connections: number; cut: number }> {
    return (await this.#testbed.do("network", { proxy: this.#number, ...conditions })) as { connections: number; cut: number };
  }
}

export class Testbed {
  #process: ChildProcess;
  #waiting: ((answer: Answer) => void)[] = [];

  constructor() {
    this.#process = spawn(process.env["BATON_TEST_PYTHON"] ?? "python3", [path("testbed.py")], {
      stdio: ["pipe", "pipe", "inherit"],
    });
    const lines = createInterface({ input: this.#process.stdout! });
    lines.on("line", (line) => this.#waiting.shift()?.(JSON.parse(line) as Answer));
    lines.on("close", () => this.#waiting.splice(0).forEach((tell) => tell({ error: "the test bed has exited" })));
  }

  async do(what: string, request: Record<string, unknown> = {}): Promise<Answer> {
    const answer = await new Promise<Answer>((done) => {
      this.#waiting.push(done);
      this.#process.stdin!.write(`${JSON.stringify({ do: what, ...request })}\n`);
    });
    if (answer["error"]) throw new Error(String(answer["error"]));
    return answer;
  }

  async proxy(to = "a"): Promise<Proxy> {
    const made = await this.do("proxy", { to });
    return new Proxy(this, Number(made["proxy"]), String(made["address"]));
  }

  end(): Promise<void> {
    return new Promise((done) => {
      this.#process.on("exit", () => done());
      this.#process.stdin!.end();
    });
  }
}
