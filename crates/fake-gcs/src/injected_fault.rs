//! What goes wrong, when, and how often; and the text for it on the command line.

use std::{num::NonZeroU32, str::FromStr, time::Duration};

/// The request a fault waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Any,
    /// A whole object in one request.
    Write,
    /// The start of a resumable upload.
    Start,
    /// The bytes of a resumable upload.
    Put,
    /// Content.
    Read,
    /// Attributes.
    Get,
    List,
    Delete,
    Compose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The work is done, the reply is lost.
    Lost,
    /// The connection is dropped before anything is done.
    Drop,
    /// No answer, ever.
    Hang,
    Delay(Duration),
    /// An HTTP status, or its gRPC likeness.
    Status(u16),
    /// The connection breaks after so many bytes of the body.
    Cut(usize),
    /// So many bytes of a resumable upload are kept, then 503.
    Keep(usize),
    /// The work is done, and its answer breaks off after so many bytes.
    Clip(usize),
    /// One bit of what is read, or of what is written at once, is wrong.
    Flip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCount {
    Forever,
    Exactly(NonZeroU32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    pub op: Op,
    pub kind: FaultKind,
    /// Only objects whose name contains this; empty is all.
    pub object: String,
    pub times: FaultCount,
}

impl InjectedFault {
    /// Happens once, to any object.
    pub fn new(op: Op, kind: FaultKind) -> Self {
        Self { op, kind, object: String::new(), times: FaultCount::Exactly(NonZeroU32::MIN) }
    }

    pub fn on(mut self, object: &str) -> Self {
        object.clone_into(&mut self.object);
        self
    }

    /// Zero is for ever.
    pub fn times(mut self, times: u32) -> Self {
        self.times = NonZeroU32::new(times).map_or(FaultCount::Forever, FaultCount::Exactly);
        self
    }
}

/// The first fault that fits, used up by one.
pub(crate) fn next_fault(faults: &mut Vec<InjectedFault>, op: Op, object: &str) -> Option<FaultKind> {
    let at =
        faults.iter().position(|fault| (fault.op == op || fault.op == Op::Any) && object.contains(&fault.object))?;
    let kind = faults[at].kind;
    if let FaultCount::Exactly(times) = faults[at].times {
        match NonZeroU32::new(times.get() - 1) {
            Some(left) => faults[at].times = FaultCount::Exactly(left),
            None => drop(faults.remove(at)),
        }
    }
    Some(kind)
}

/// Why a text is not a fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0}; a fault is OP:KIND[:VALUE][,object=TEXT][,times=N|forever] with \
     OP any, write, start, put, read, get, list, delete or compose and \
     KIND lost, drop, hang, delay:2s, status:503, cut:512KiB, keep:512KiB, clip:20 or flip"
)]
pub struct MalformedFault(String);

/// Reads `OP:KIND[:VALUE][,object=TEXT][,times=N|forever]`, for example `write:lost,object=lock.json,times=3`.
pub fn parse_fault(text: &str) -> Result<InjectedFault, MalformedFault> {
    let mut parts = text.split(',');
    let mut what = parts.next().unwrap_or_default().splitn(3, ':');
    let op = what.next().unwrap_or_default();
    let op = match op {
        "any" => Op::Any,
        "write" => Op::Write,
        "start" => Op::Start,
        "put" => Op::Put,
        "read" => Op::Read,
        "get" => Op::Get,
        "list" => Op::List,
        "delete" => Op::Delete,
        "compose" => Op::Compose,
        _ => return Err(MalformedFault(format!("{op:?} is no request"))),
    };
    let (kind, value) = (what.next().unwrap_or_default(), what.next());
    let kind = match (kind, value) {
        ("lost", None) => FaultKind::Lost,
        ("drop", None) => FaultKind::Drop,
        ("hang", None) => FaultKind::Hang,
        ("flip", None) => FaultKind::Flip,
        ("delay", Some(value)) => FaultKind::Delay(
            humantime::parse_duration(value).map_err(|_| MalformedFault(format!("{value:?} is no duration")))?,
        ),
        ("status", Some(value)) => FaultKind::Status(number(value)?),
        ("cut", Some(value)) => FaultKind::Cut(bytes(value)?),
        ("keep", Some(value)) => FaultKind::Keep(bytes(value)?),
        ("clip", Some(value)) => FaultKind::Clip(bytes(value)?),
        _ => return Err(MalformedFault(format!("{kind:?} is no fault, or its value is missing or too much"))),
    };
    let mut fault = InjectedFault::new(op, kind);
    for part in parts {
        match part.split_once('=') {
            Some(("object", name)) => name.clone_into(&mut fault.object),
            Some(("times", "forever")) => fault.times = FaultCount::Forever,
            Some(("times", count)) => fault.times = FaultCount::Exactly(number(count)?),
            _ => return Err(MalformedFault(format!("{part:?} is neither object nor times"))),
        }
    }
    Ok(fault)
}

fn number<T: FromStr>(text: &str) -> Result<T, MalformedFault> {
    text.parse().map_err(|_| MalformedFault(format!("{text:?} is no number that fits")))
}

fn bytes(text: &str) -> Result<usize, MalformedFault> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let unit = units.iter().find_map(|(unit, shift)| text.strip_suffix(unit).map(|count| (count, shift)));
    let (count, shift) = unit.unwrap_or((text, &0));
    let count: usize = number(count)?;
    count.checked_mul(1 << shift).ok_or_else(|| MalformedFault(format!("{text:?} is too much")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_read_as_it_is_written() {
        assert_eq!(parse_fault("write:lost").unwrap(), InjectedFault::new(Op::Write, FaultKind::Lost));
        assert_eq!(
            parse_fault("put:cut:512KiB,object=pages.img,times=3").unwrap(),
            InjectedFault::new(Op::Put, FaultKind::Cut(512 << 10)).on("pages.img").times(3)
        );
        assert_eq!(
            parse_fault("any:delay:30ms,times=forever").unwrap(),
            InjectedFault::new(Op::Any, FaultKind::Delay(Duration::from_millis(30))).times(0)
        );
        assert_eq!(parse_fault("write:clip:20").unwrap(), InjectedFault::new(Op::Write, FaultKind::Clip(20)));
        assert_eq!(parse_fault("list:status:429").unwrap(), InjectedFault::new(Op::List, FaultKind::Status(429)));
        for bad in
            ["", "write", "walk:lost", "write:lost:1", "read:cut", "read:cut:x", "any:flip,times=0", "any:flip,x"]
        {
            let error = parse_fault(bad).unwrap_err().to_string();
            assert!(error.contains("OP:KIND"), "{bad:?}: {error}");
        }
    }

    #[test]
    fn a_fault_happens_as_often_as_it_says_to_the_objects_it_names() {
        let mut faults = vec![InjectedFault::new(Op::Write, FaultKind::Lost).on("lock").times(2)];
        assert_eq!(next_fault(&mut faults, Op::Read, "lock.json"), None);
        assert_eq!(next_fault(&mut faults, Op::Write, "metadata.json"), None);
        assert_eq!(next_fault(&mut faults, Op::Write, "a/lock.json"), Some(FaultKind::Lost));
        assert_eq!(next_fault(&mut faults, Op::Write, "a/lock.json"), Some(FaultKind::Lost));
        assert_eq!(next_fault(&mut faults, Op::Write, "a/lock.json"), None);
        let mut faults = vec![InjectedFault::new(Op::Any, FaultKind::Drop).times(0)];
        for _ in 0..5 {
            assert_eq!(next_fault(&mut faults, Op::List, ""), Some(FaultKind::Drop));
        }
    }
}
