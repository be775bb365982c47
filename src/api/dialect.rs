//! The dialect of a session, and what a plain client gets of an event. Pure.
//!
//! A plain client gets the five documented events with their documented fields only, unless it asked for details. Its
//! words are a property of the sandbox: a client that creates a sandbox with a flag of the predecessor, or attaches to
//! such a sandbox, gets the predecessor's. `BATON_PLAIN=predecessor` gives those to every plain client.

use baton_protocol::{
    event::{Event, Status, StdStream, Update},
    metadata::{PlainWords, Spec},
    request::SandboxConfig,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `baton.v1`.
    V1,
    Documents,
    Predecessor,
}

impl Dialect {
    /// The dialect before anything is known about the sandbox.
    pub fn of_server(is_v1: bool, server: PlainWords) -> Self {
        match (is_v1, server) {
            (true, _) => Self::V1,
            (false, PlainWords::Documents) => Self::Documents,
            (false, PlainWords::Predecessor) => Self::Predecessor,
        }
    }

    pub fn of_create(self, config: &SandboxConfig) -> Self {
        if self == Self::Documents && config.has_predecessor_flags() { Self::Predecessor } else { self }
    }

    pub fn of_attach(self, spec: &Spec) -> Self {
        if self == Self::Documents && spec.plain_words() == PlainWords::Predecessor { Self::Predecessor } else { self }
    }

    pub fn is_v1(self) -> bool {
        self == Self::V1
    }

    /// The words stored with a sandbox created in this dialect, for plain clients that attach to it.
    pub fn plain_words(self) -> PlainWords {
        match self {
            Self::V1 | Self::Documents => PlainWords::Documents,
            Self::Predecessor => PlainWords::Predecessor,
        }
    }

    /// Whether LOCK_* is sent, and DELETING and DELETED around a checkpoint.
    pub fn sends_all_steps(self) -> bool {
        self != Self::Documents
    }
}

/// What a plain client without details gets instead of `event`.
pub fn without_details(event: &Event, dialect: Dialect) -> Vec<Event> {
    match event {
        Event::StatusUpdate(Update { status, message, .. }) => {
            let text = message.iter().filter(|_| reports_loss(*status, dialect));
            let error = text.map(|message| Event::Error { message: message.clone() });
            [Event::status(*status)].into_iter().chain(error).collect()
        }
        Event::SandboxId { sandbox_id, sandbox_token, .. } => vec![Event::SandboxId {
            sandbox_id: sandbox_id.clone(),
            sandbox_token: sandbox_token.clone(),
            persistent: None,
        }],
        Event::Stdout { .. } | Event::Stderr { .. } | Event::Error { .. } => {
            vec![event.clone()]
        }
        Event::RolledBack { age_ms, .. } => {
            let seconds = age_ms.div_ceil(1000);
            let message = format!("The sandbox was restored from a checkpoint of {seconds} s ago: later work is lost.");
            vec![Event::Error { message }]
        }
        Event::OutputGap { stream, from, to, .. } => {
            let name = match stream {
                StdStream::Stdout => "stdout",
                StdStream::Stderr => "stderr",
            };
            vec![Event::Error {
                message: format!("{} bytes of {name} were not kept and are lost.", to.saturating_sub(*from)),
            }]
        }
        Event::Hello { .. }
        | Event::StdinAck { .. }
        | Event::OutputRewound { .. }
        | Event::Forked { .. }
        | Event::EgressDenied { .. }
        | Event::IdleTimeout { .. } => {
            vec![]
        }
    }
}

/// Whether the status is not an error but its message reports a loss, which must not be dropped with the field.
fn reports_loss(status: Status, dialect: Dialect) -> bool {
    status == Status::Running || (status == Status::Deleted && dialect == Dialect::Documents)
}

#[cfg(test)]
mod tests {
    use baton_protocol::id::{ExecId, SandboxId};

    use super::*;

    fn texts(event: &Event, dialect: Dialect) -> Vec<String> {
        without_details(event, dialect).iter().map(Event::to_json).collect()
    }

    #[test]
    fn a_status_is_left_with_the_two_fields_of_the_documents() {
        for status in Status::ALL {
            let update = Update {
                message: Some("text".to_owned()),
                exec: Some(1),
                exec_id: ExecId::parse("e").ok(),
                exit_code: Some(0),
                duration_ms: Some(5),
                ..Update::new(*status)
            };
            for dialect in [Dialect::Documents, Dialect::Predecessor] {
                let texts = texts(&Event::StatusUpdate(update.clone()), dialect);
                let bare = format!(r#"{{"event":"status_update","status":"{}"}}"#, status.as_str());
                assert_eq!(texts[0], bare);
                let is_lost =
                    *status == Status::Running || (*status == Status::Deleted && dialect == Dialect::Documents);
                let rest = if is_lost { vec![r#"{"event":"error","message":"text"}"#] } else { vec![] };
                assert_eq!(texts[1..], rest, "{dialect:?}");
            }
        }
    }

    #[test]
    fn loss_is_told_in_words_and_what_only_v1_knows_is_left_out() {
        let exec_id = || ExecId::parse("e").unwrap();
        let id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let token = baton_protocol::event::Token("t".to_owned());
        let told = Event::SandboxId { sandbox_id: id, sandbox_token: token, persistent: Some(true) };
        assert!(!texts(&told, Dialect::Documents)[0].contains("persistent"));
        let gap = Event::OutputGap { exec_id: exec_id(), stream: StdStream::Stderr, from: 5, to: 12 };
        let told = r#"{"event":"error","message":"7 bytes of stderr were not kept and are lost."}"#;
        assert_eq!(texts(&gap, Dialect::Documents), [told]);
        let id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let checkpoint_id = format!("{}-1-1-0123456789abcdef0123456789abcdef", id.as_str()).parse().unwrap();
        let back = texts(&Event::RolledBack { checkpoint_id, age_ms: 1500 }, Dialect::Documents);
        assert!(back[0].contains("checkpoint of 2 s ago"), "{back:?}");
        assert!(texts(&Event::StdinAck { exec_id: exec_id(), offset: 1 }, Dialect::Documents).is_empty());
    }

    #[test]
    fn a_flag_of_the_predecessor_brings_its_words_to_plain_clients_only() {
        let flag = SandboxConfig { enable_sandbox_handoff: Some(false), ..SandboxConfig::default() };
        assert_eq!(Dialect::Documents.of_create(&flag), Dialect::Predecessor);
        assert_eq!(Dialect::Documents.of_create(&SandboxConfig::default()), Dialect::Documents);
        assert_eq!(Dialect::V1.of_create(&flag), Dialect::V1);
        assert_eq!(Dialect::of_server(false, PlainWords::Predecessor), Dialect::Predecessor);
        assert_eq!(Dialect::of_server(true, PlainWords::Predecessor), Dialect::V1);
    }
}
