//! What `POST /execute` responds with: the output as text while the command runs, or one JSON object at its end.

use axum::{
    Json,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use baton_protocol::event::{StdStream, Update};
use bytes::Bytes;
use serde_json::json;

/// How much of each stream a JSON response holds.
pub const MAX_OUTPUT: usize = 1 << 20;

/// The form of the response, chosen by the `Accept` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseForm {
    Text,
    Json,
}

impl ResponseForm {
    pub fn of(headers: &HeaderMap) -> Self {
        let lines = headers.get_all(header::ACCEPT).iter().filter_map(|line| line.to_str().ok());
        let mut types =
            lines.flat_map(|line| line.split(',')).map(|range| range.split(';').next().unwrap_or("").trim());
        if types.any(|name| name.eq_ignore_ascii_case("application/json")) { Self::Json } else { Self::Text }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; charset=utf-8",
            Self::Json => "application/json",
        }
    }

    pub fn refusal(self, status: StatusCode, text: &str) -> Response {
        match self {
            Self::Text => (status, text.to_owned()).into_response(),
            Self::Json => (status, Json(json!({"message": text}))).into_response(),
        }
    }
}

/// The output of the command, as far as a JSON response holds it.
#[derive(Debug, Default)]
pub struct CollectedOutput {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    is_truncated: bool,
}

impl CollectedOutput {
    pub fn add(&mut self, output: StdStream, bytes: &[u8]) {
        let kept = match output {
            StdStream::Stdout => &mut self.stdout,
            StdStream::Stderr => &mut self.stderr,
        };
        let room = MAX_OUTPUT.saturating_sub(kept.len()).min(bytes.len());
        kept.extend_from_slice(&bytes[..room]);
        self.is_truncated |= room < bytes.len();
    }

    /// The response. Bytes that are not UTF-8 become U+FFFD.
    pub fn to_json(&self, done: &Update) -> Bytes {
        let body = json!({
            "exit_code": done.exit_code,
            "signal": done.signal,
            "timed_out": done.timed_out,
            "stdout": String::from_utf8_lossy(&self.stdout),
            "stderr": String::from_utf8_lossy(&self.stderr),
            "truncated": self.is_truncated,
            "duration_ms": done.duration_ms,
        });
        Bytes::from(body.to_string())
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::event::Status;

    use super::*;

    #[test]
    fn json_is_for_those_who_name_it() {
        for (accept, form) in [
            ("application/json", ResponseForm::Json),
            ("text/html, Application/JSON; q=0.9", ResponseForm::Json),
            ("*/*", ResponseForm::Text),
            ("text/plain", ResponseForm::Text),
            ("application/json-seq", ResponseForm::Text),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]);
            assert_eq!(ResponseForm::of(&headers), form, "{accept}");
        }
        assert_eq!(ResponseForm::of(&HeaderMap::new()), ResponseForm::Text);
    }

    #[test]
    fn output_beyond_the_limit_is_cut_and_that_is_said() {
        let mut output = CollectedOutput::default();
        let done = Update { exit_code: Some(0), ..Update::new(Status::ExecutionDone) };
        output.add(StdStream::Stdout, &vec![b'a'; MAX_OUTPUT]);
        assert!(!output.is_truncated);
        output.add(StdStream::Stderr, b"\xff");
        output.add(StdStream::Stdout, b"b");
        let body: serde_json::Value = serde_json::from_slice(&output.to_json(&done)).unwrap();
        assert_eq!((&body["truncated"], &body["stderr"]), (&json!(true), &json!("\u{fffd}")));
        assert_eq!(body["stdout"].as_str().unwrap().len(), MAX_OUTPUT);
    }
}
