//! Translates a client's exec into what the agent starts. Pure.

use baton_protocol::{
    agent,
    event::Status,
    frame::MAX_PAYLOAD,
    id::ExecId,
    request::{Command, ExecRequest, Language, Refusal},
};

/// Longer code does not fit into one argument of a process.
const LONGEST_ARGUMENT: usize = 100 << 10;

/// Takes the code from the first bytes of stdin, leaves the rest to the code, and defines no name that the code sees.
const PYTHON_FROM_STDIN: &str = "\
def _read():
    import os, sys
    left, parts = int(sys.argv.pop(1)), []
    while left:
        part = os.read(0, min(left, 1 << 20))
        if not part:
            sys.exit('the code did not arrive')
        parts.append(part)
        left -= len(part)
    return compile(b''.join(parts), '<string>', 'exec')
exec(globals().pop('_read')())
";
/// `head -c` never reads more bytes than requested.
const BASH_FROM_STDIN: &str = r#"set -- "$(head -c "$1")"; eval "shift
$1""#;

/// What to start, and the first bytes of its stdin.
#[derive(Debug)]
pub struct ExecStart {
    pub payload: Vec<u8>,
    pub prelude: Vec<u8>,
    /// Whether the client may write to stdin.
    pub stdin: bool,
}

pub fn start(exec: &ExecRequest, exec_id: &ExecId, is_v1: bool) -> Result<ExecStart, Refusal> {
    let mut env = exec.env.clone();
    let mut prelude = Vec::new();
    let argv = match &exec.command {
        Command::Argv(argv) => argv.clone(),
        // An agent too old to know `file` finds no such program and reports that.
        Command::File(work) => vec![format!("baton-agent {}", work.word())],
        Command::Code { language, code } => {
            let interpreter = match language {
                Language::Python => "python3",
                Language::Bash => "bash",
            };
            if *language == Language::Python {
                // Every print becomes visible when it happens.
                env.entry("PYTHONUNBUFFERED".to_owned()).or_insert_with(|| "1".to_owned());
            }
            if code.len() <= LONGEST_ARGUMENT {
                vec![interpreter.to_owned(), "-c".to_owned(), code.clone()]
            } else if is_v1 && exec.stdin {
                // The client counts its stdin from zero, even after a reconnect to another instance.
                let message = "Code of more than 100 KiB cannot be combined with `stdin`.";
                return Err(Refusal::of(Status::ExecutionError, message));
            } else {
                prelude = code.clone().into_bytes();
                let length = prelude.len().to_string();
                match language {
                    Language::Python => {
                        vec![interpreter.to_owned(), "-c".to_owned(), PYTHON_FROM_STDIN.to_owned(), length]
                    }
                    Language::Bash => vec![
                        interpreter.to_owned(),
                        "-c".to_owned(),
                        BASH_FROM_STDIN.to_owned(),
                        interpreter.to_owned(),
                        length,
                    ],
                }
            }
        }
    };
    let start = agent::AgentExec {
        exec_id: exec_id.clone(),
        argv,
        env,
        cwd: exec.cwd.clone(),
        user: exec.user.clone(),
        stdin: exec.stdin || !prelude.is_empty(),
        pty: exec.pty,
        timeout_ms: exec.timeout.map(|timeout| timeout.as_millis().try_into().unwrap_or(u64::MAX)),
        file: match &exec.command {
            Command::File(work) => Some(work.clone()),
            Command::Argv(_) | Command::Code { .. } => None,
        },
    };
    let payload = serde_json::to_vec(&start).map_err(|_| Refusal::of(Status::ExecutionError, "It cannot be sent."))?;
    if payload.len() > MAX_PAYLOAD {
        return Err(Refusal::of(Status::ExecutionError, "The command and its environment are too long."));
    }
    Ok(ExecStart { payload, prelude, stdin: exec.stdin })
}

/// The number of the signal with this name, with or without `SIG`.
pub fn signal(name: &str) -> Option<u64> {
    Some(match name.strip_prefix("SIG").unwrap_or(name) {
        "HUP" => 1,
        "INT" => 2,
        "QUIT" => 3,
        "ABRT" => 6,
        "KILL" => 9,
        "USR1" => 10,
        "USR2" => 12,
        "PIPE" => 13,
        "ALRM" => 14,
        "TERM" => 15,
        "CHLD" => 17,
        "CONT" => 18,
        "STOP" => 19,
        "TSTP" => 20,
        "TTIN" => 21,
        "TTOU" => 22,
        "URG" => 23,
        "WINCH" => 28,
        "IO" => 29,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command as Process, Stdio},
    };

    use super::*;

    fn started(exec: &ExecRequest) -> (agent::AgentExec, Vec<u8>) {
        let start = start(exec, &ExecId::parse("a").unwrap(), false).unwrap();
        (serde_json::from_slice(&start.payload).unwrap(), start.prelude)
    }

    /// Runs what the agent would run, with `rest` after the prelude.
    fn run(language: Language, code: String, rest: &str) -> String {
        let (exec, prelude) = started(&ExecRequest::plain(language, code));
        let mut child = Process::new(&exec.argv[0])
            .args(&exec.argv[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(&prelude).unwrap();
        stdin.write_all(rest.as_bytes()).unwrap();
        drop(stdin);
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    }

    #[test]
    fn short_code_is_an_argument_and_long_code_comes_by_stdin() {
        let (exec, prelude) = started(&ExecRequest::plain(Language::Bash, "echo é".into()));
        assert_eq!((exec.argv, prelude.len()), (vec!["bash".to_owned(), "-c".into(), "echo é".into()], 0));
        let (exec, prelude) = started(&ExecRequest::plain(Language::Python, "#".repeat(LONGEST_ARGUMENT + 1)));
        assert_eq!((exec.argv[3].as_str(), prelude.len()), ("102401", LONGEST_ARGUMENT + 1));
        assert_eq!(exec.env["PYTHONUNBUFFERED"], "1");
    }

    #[test]
    fn long_code_runs_like_short_code_and_leaves_stdin_alone() {
        let filler = "#é\n".repeat(LONGEST_ARGUMENT);
        let code = format!(
            "import sys\n{filler}print(sys.argv, sorted(set(globals()) & {{'_read','os'}}), __name__)\nprint(input())\n"
        );
        assert_eq!(run(Language::Python, code, "rest\n"), "['-c'] [] __main__\nrest\n");
        let code = format!("{filler}echo \"$0 $#\"; read line; echo \"$line\"; cat <<X\n'\\x\nX\n");
        assert_eq!(run(Language::Bash, code, "rest\n"), "bash 0\nrest\n'\\x\n");
    }

    #[test]
    fn what_does_not_fit_into_a_frame_is_refused() {
        let exec_id = ExecId::parse("a").unwrap();
        let mut exec = ExecRequest::plain(Language::Bash, String::new());
        exec.env.insert("A".into(), "x".repeat(MAX_PAYLOAD));
        assert_eq!(start(&exec, &exec_id, false).unwrap_err().status, Status::ExecutionError);
        let long = ExecRequest::plain(Language::Bash, "#".repeat(LONGEST_ARGUMENT + 1));
        assert_eq!(start(&long, &exec_id, true).unwrap_err().status, Status::ExecutionError);
    }

    #[test]
    fn signals_have_names() {
        assert_eq!((signal("INT"), signal("SIGTERM"), signal("DANCE"), signal("")), (Some(2), Some(15), None, None));
    }
}
