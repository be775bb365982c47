//! Pauses and resumes a container and counts its processes over its control socket, as `runsc pause` and `runsc
//! resume` do, but without starting a process, which took longer than all other work before an image.
//!
//! The sentry counts pauses, and one resume too many ends it. So no request is sent while an answer is pending:
//! the next caller waits for that answer first, even if the earlier caller was cancelled.

use std::{io, path::PathBuf};

use serde::Deserialize;
use tokio::{io::AsyncReadExt, net::UnixStream, sync::Mutex};

/// The longest accepted answer.
const MAX_ANSWER: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct SentryControl {
    socket: PathBuf,
    tasks: Mutex<Tasks>,
}

/// The state of a container's tasks, as last reported by its sentry.
#[derive(Debug)]
enum Tasks {
    Run,
    Pausing(Question),
    Stand,
    Resuming(Question),
}

/// A request without an answer yet.
#[derive(Debug)]
struct Question {
    stream: UnixStream,
    heard: Vec<u8>,
}

#[derive(Debug, Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
}

/// The answer to a request for control files.
#[derive(Debug, Deserialize)]
struct Counted {
    result: Results,
}

#[derive(Debug, Deserialize)]
struct Results {
    results: Vec<Read>,
}

#[derive(Debug, Deserialize)]
struct Read {
    value: String,
}

impl SentryControl {
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, tasks: Mutex::new(Tasks::Run) }
    }

    /// Waits until every task is paused. Cancel safe.
    pub async fn pause(&self) -> io::Result<()> {
        let mut tasks = self.tasks.lock().await;
        // The outcome of an earlier request shows in the state of the tasks.
        let _ = await_pending(&mut tasks).await;
        if matches!(*tasks, Tasks::Run) {
            *tasks =
                Tasks::Pausing(Question::ask(&self.socket, "containerManager.Pause", &serde_json::Value::Null).await?);
        }
        await_pending(&mut tasks).await
    }

    /// Waits until every task may run. Cancel safe.
    pub async fn resume(&self) -> io::Result<()> {
        let mut tasks = self.tasks.lock().await;
        let _ = await_pending(&mut tasks).await;
        if matches!(*tasks, Tasks::Stand) {
            *tasks = Tasks::Resuming(
                Question::ask(&self.socket, "containerManager.Resume", &serde_json::Value::Null).await?,
            );
        }
        await_pending(&mut tasks).await
    }

    /// Counts the processes and threads inside, of all users.
    pub async fn processes(&self) -> io::Result<u64> {
        let file = serde_json::json!({"controller": "pids", "path": "/", "name": "pids.current"});
        let asked = serde_json::json!({"args": [{"file": file}]});
        let mut question = Question::ask(&self.socket, "Cgroups.ReadControlFiles", &asked).await?;
        question.answer().await?;
        let count = serde_json::from_slice::<Counted>(&question.heard)?.result.results.pop();
        count.and_then(|count| count.value.parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Waits for the pending answer, if any. If none arrives, the state is unknown and the tasks are taken to run:
/// a sandbox that is paused after all is unresponsive, but one that is resumed once too often is lost.
async fn await_pending(tasks: &mut Tasks) -> io::Result<()> {
    let (answer, meant) = match tasks {
        Tasks::Run | Tasks::Stand => return Ok(()),
        Tasks::Pausing(question) => (question.answer().await, Tasks::Stand),
        Tasks::Resuming(question) => (question.answer().await, Tasks::Run),
    };
    *tasks = if answer.is_ok() { meant } else { Tasks::Run };
    answer
}

impl Question {
    async fn ask(socket: &std::path::Path, method: &str, asked: &serde_json::Value) -> io::Result<Self> {
        let stream = UnixStream::connect(socket).await?;
        let text = serde_json::json!({"method": method, "arg": asked}).to_string();
        stream.writable().await?;
        // In one write, so that the request is sent completely or not at all: an unused socket has buffer space
        // for it.
        if stream.try_write(text.as_bytes())? == text.len() {
            return Ok(Self { stream, heard: Vec::new() });
        }
        Err(io::ErrorKind::WriteZero.into())
    }

    async fn answer(&mut self) -> io::Result<()> {
        loop {
            match serde_json::from_slice::<Answer>(&self.heard) {
                Ok(Answer { success: true, .. }) => return Ok(()),
                Ok(Answer { err, .. }) => return Err(io::Error::other(err)),
                Err(error) if error.is_eof() && self.heard.len() < MAX_ANSWER => {}
                Err(error) => return Err(error.into()),
            }
            if self.stream.read_buf(&mut self.heard).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use futures::FutureExt;
    use tokio::{
        io::AsyncWriteExt,
        net::UnixListener,
        sync::mpsc::{UnboundedReceiver, unbounded_channel},
    };
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::clock::{SharedClock, SystemClock};

    const YES: &str = r#"{"success":true,"err":"","result":null}"#;

    struct Sentry {
        _directory: tempfile::TempDir,
        control: Arc<SentryControl>,
        clock: SharedClock,
        tasks: TaskTracker,
        asked: UnboundedReceiver<(String, UnixStream)>,
    }

    /// Accepts every request and leaves the answer to the test.
    fn sentry() -> Sentry {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("control");
        let listener = UnixListener::bind(&socket).unwrap();
        let (sender, asked) = unbounded_channel();
        let tasks = TaskTracker::new();
        tasks.spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut text = vec![0; 256];
                let count = stream.read(&mut text).await.unwrap();
                let text: serde_json::Value = serde_json::from_slice(&text[..count]).unwrap();
                let method = text["method"].as_str().unwrap().trim_start_matches("containerManager.").to_owned();
                sender.send((method, stream)).unwrap();
            }
        });
        let control = Arc::new(SentryControl::new(socket));
        Sentry { _directory: directory, control, clock: Arc::new(SystemClock), tasks, asked }
    }

    impl Sentry {
        async fn next(&mut self) -> (String, UnixStream) {
            self.clock.timeout(Duration::from_secs(10), self.asked.recv()).await.unwrap().unwrap()
        }

        async fn answers(&mut self, method: &str, answer: &str) {
            let (asked, mut stream) = self.next().await;
            assert_eq!(asked, method);
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn each_is_asked_once_however_often_it_is_wanted() {
        let mut sentry = sentry();
        let control = sentry.control.clone();
        control.resume().await.unwrap();
        for method in ["Pause", "Resume", "Pause"] {
            let wanted = async {
                for _ in 0..2 {
                    if method == "Pause" { control.pause().await } else { control.resume().await }.unwrap();
                }
            };
            futures::join!(wanted, sentry.answers(method, YES));
        }
        assert!(sentry.asked.recv().now_or_never().is_none(), "something more was asked");
    }

    #[tokio::test]
    async fn whoever_comes_after_one_who_left_waits_for_the_same_answer() {
        let mut sentry = sentry();
        let control = sentry.control.clone();
        let left = sentry.tasks.spawn({
            let control = control.clone();
            async move { control.pause().await }
        });
        let (_, mut stream) = sentry.next().await;
        stream.write_all(&YES.as_bytes()[..7]).await.unwrap();
        left.abort();
        assert!(left.await.unwrap_err().is_cancelled());
        let resumed = sentry.tasks.spawn({
            let control = control.clone();
            async move { control.resume().await }
        });
        let asked = sentry.clock.timeout(Duration::from_millis(50), sentry.asked.recv()).await;
        assert!(asked.is_err(), "it did not wait");
        stream.write_all(&YES.as_bytes()[7..]).await.unwrap();
        sentry.answers("Resume", YES).await;
        resumed.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn what_was_refused_or_not_answered_is_never_resumed() {
        for answer in [r#"{"success":false,"err":"not now"}"#, "", "no sentence", r#"{"success":1}"#] {
            let mut sentry = sentry();
            let control = sentry.control.clone();
            let (paused, ()) = futures::join!(control.pause(), sentry.answers("Pause", answer));
            let error = paused.unwrap_err().to_string();
            assert!(!answer.contains("not now") || error == "not now", "{error}");
            control.resume().await.unwrap();
            assert!(sentry.asked.recv().now_or_never().is_none(), "{answer:?}: it was resumed");
        }
    }

    #[tokio::test]
    async fn no_socket_is_an_error_and_changes_nothing() {
        let control = SentryControl::new("/nowhere/control".into());
        assert_eq!(control.pause().await.unwrap_err().kind(), io::ErrorKind::NotFound);
        control.resume().await.unwrap();
    }
}
