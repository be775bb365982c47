//! The protocol between server and guard: one message per line.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

/// An order from the server. Deadlines are moments of the boot-time clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Watches a container that is about to start. Answered by `armed`.
    Arm {
        container: String,
        deadline: Duration,
        confirm: Duration,
        state_file: PathBuf,
    },
    Extend {
        container: String,
        deadline: Duration,
    },
    /// Assigns a warm container to a sandbox and sets its deadline. Answered by `taken`.
    Take {
        container: String,
        deadline: Duration,
    },
    /// From now on the container has state worth keeping.
    Synced {
        container: String,
    },
    /// Stops it now. Answered by `fenced` or `killed`.
    Fence {
        container: String,
    },
    /// Lets it continue. Answered by `resumed`, or by `fenced` if the deadline has passed.
    Resume {
        container: String,
        deadline: Duration,
    },
    /// The container is gone. Answered by `disarmed`.
    Disarm {
        container: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuardReport {
    pub what: GuardOutcome,
    pub container: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumIter, strum::EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum GuardOutcome {
    Armed,
    Taken,
    /// All of its threads are stopped.
    Fenced,
    Killed,
    Resumed,
    Disarmed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a line of the guard's protocol")]
pub struct MalformedMessage;

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Order::Arm { container, deadline, confirm, state_file } => {
                let (deadline, confirm) = (deadline.as_nanos(), confirm.as_nanos());
                write!(f, "arm {container} {deadline} {confirm} {}", state_file.display())
            }
            Order::Extend { container, deadline } => write!(f, "extend {container} {}", deadline.as_nanos()),
            Order::Take { container, deadline } => write!(f, "take {container} {}", deadline.as_nanos()),
            Order::Synced { container } => write!(f, "synced {container}"),
            Order::Fence { container } => write!(f, "fence {container}"),
            Order::Resume { container, deadline } => write!(f, "resume {container} {}", deadline.as_nanos()),
            Order::Disarm { container } => write!(f, "disarm {container}"),
        }
    }
}

impl FromStr for Order {
    type Err = MalformedMessage;
    fn from_str(line: &str) -> Result<Self, MalformedMessage> {
        let mut words = line.splitn(5, ' ');
        let mut word = || words.next().ok_or(MalformedMessage);
        let (verb, container) = (word()?, word()?.to_owned());
        Ok(match verb {
            "arm" => {
                let (deadline, confirm) = (nanos(word()?)?, nanos(word()?)?);
                Order::Arm { container, deadline, confirm, state_file: Path::new(word()?).to_owned() }
            }
            "extend" => Order::Extend { container, deadline: nanos(word()?)? },
            "take" => Order::Take { container, deadline: nanos(word()?)? },
            "synced" => Order::Synced { container },
            "fence" => Order::Fence { container },
            "resume" => Order::Resume { container, deadline: nanos(word()?)? },
            "disarm" => Order::Disarm { container },
            _ => return Err(MalformedMessage),
        })
    }
}

fn nanos(text: &str) -> Result<Duration, MalformedMessage> {
    text.parse().map(Duration::from_nanos).map_err(|_| MalformedMessage)
}

impl fmt::Display for GuardReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.what, self.container)
    }
}

impl FromStr for GuardReport {
    type Err = MalformedMessage;
    fn from_str(line: &str) -> Result<Self, MalformedMessage> {
        let (verb, container) = line.split_once(' ').ok_or(MalformedMessage)?;
        let what = verb.parse().map_err(|_| MalformedMessage)?;
        Ok(Self { what, container: container.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    #[test]
    fn every_line_is_read_as_it_was_meant() {
        let (container, deadline) = ("c1".to_owned(), Duration::from_nanos(12_345));
        let state_file = PathBuf::from("/run/a b/c.state");
        let orders = [
            Order::Arm { container: container.clone(), deadline, confirm: Duration::from_secs(2), state_file },
            Order::Extend { container: container.clone(), deadline },
            Order::Take { container: container.clone(), deadline },
            Order::Synced { container: container.clone() },
            Order::Fence { container: container.clone() },
            Order::Resume { container: container.clone(), deadline },
            Order::Disarm { container: container.clone() },
        ];
        for order in orders {
            assert_eq!(order.to_string().parse(), Ok(order));
        }
        for what in GuardOutcome::iter() {
            let report = GuardReport { what, container: container.clone() };
            assert_eq!(report.to_string().parse(), Ok(report));
        }
    }

    #[test]
    fn nonsense_is_malformed() {
        for bad in ["", "arm", "arm c", "arm c 1 2", "extend c x", "take c", "resume c", "sing c"] {
            assert_eq!(bad.parse::<Order>(), Err(MalformedMessage), "{bad:?}");
        }
        assert_eq!("fenced".parse::<GuardReport>(), Err(MalformedMessage));
    }
}
