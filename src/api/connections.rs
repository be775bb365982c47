//! Which connections are open, and which of them to close when another one arrives and the table is full.
//!
//! A connection is proven while it carries a request with a valid key, or a session with a valid token. Any other may
//! be closed: a new connection replaces the one that has been idle longest. A few slots are reserved for unproven
//! connections, so a new one is always read, such as a health probe or a client with a key.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::caller::Caller;

/// One in this many slots is reserved for unproven connections, and `MOST_RESERVED` at most.
const RESERVED_SHARE: usize = 16;
const MOST_RESERVED: usize = 64;

/// What a connection is doing, and whether it is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Waits for a request, or for the rest of its head.
    Idle,
    /// A request or session is in progress that has not shown a valid key or token yet.
    Unproven,
    Proven,
}

/// How many connections may be open.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    pub total: usize,
    /// How many unproven ones of one address; `None` means no limit.
    pub per_peer: Option<usize>,
}

impl Caps {
    fn proven(self) -> usize {
        let reserved = (self.total / RESERVED_SHARE).clamp(1, MOST_RESERVED);
        self.total.saturating_sub(reserved).max(1)
    }
}

/// What to do with a connection that was just accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Accept,
    /// Accept, and close this one.
    Replace(u64),
    Refuse,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    peer: Caller,
    standing: Standing,
    /// Number of the last change, counted over all connections: the smallest has not changed for longest.
    since: u64,
}

fn admit(caps: Caps, newcomer: Caller, open: impl ExactSizeIterator<Item = (u64, Entry)> + Clone) -> Verdict {
    let count = open.len();
    let unproven = open.filter(|(_, entry)| entry.standing != Standing::Proven);
    let oldest = |entry: &(u64, Entry)| (entry.1.standing != Standing::Idle, entry.1.since);
    let of_peer = unproven.clone().filter(|(_, entry)| entry.peer == newcomer);
    let victim = if caps.per_peer.is_some_and(|most| of_peer.clone().count() >= most) {
        of_peer.min_by_key(oldest)
    } else if count >= caps.total {
        unproven.min_by_key(oldest)
    } else {
        return Verdict::Accept;
    };
    victim.map_or(Verdict::Refuse, |(number, _)| Verdict::Replace(number))
}

#[derive(Debug)]
struct Open {
    entry: Entry,
    /// The connection became a WebSocket: it outlives the request.
    is_upgraded: bool,
    closed: CancellationToken,
    standing: watch::Sender<Standing>,
}

#[derive(Debug, Default)]
struct Inner {
    open: BTreeMap<u64, Open>,
    changes: u64,
}

impl Inner {
    fn set(&mut self, number: u64, standing: Standing) {
        self.changes += 1;
        let since = self.changes;
        if let Some(open) = self.open.get_mut(&number) {
            open.entry = Entry { standing, since, ..open.entry };
            open.standing.send_replace(standing);
        }
    }
}

/// All connections of one listener.
#[derive(Debug)]
pub struct Connections {
    caps: Caps,
    inner: Mutex<Inner>,
}

impl Connections {
    pub fn new(caps: Caps) -> Arc<Self> {
        Arc::new(Self { caps, inner: Mutex::default() })
    }

    /// Returns a slot for a new connection; closes another one if a limit is reached.
    pub fn admit(self: &Arc<Self>, peer: IpAddr) -> Option<ConnectionSlot> {
        let peer = Caller::of(peer);
        let mut inner = self.inner.lock();
        let open = inner.open.iter().map(|(number, open)| (*number, open.entry));
        match admit(self.caps, peer, open) {
            Verdict::Accept => {}
            Verdict::Replace(number) => {
                if let Some(open) = inner.open.remove(&number) {
                    open.closed.cancel();
                }
            }
            Verdict::Refuse => return None,
        }
        inner.changes += 1;
        let number = inner.changes;
        let (standing, seen) = watch::channel(Standing::Idle);
        let closed = CancellationToken::new();
        let entry = Entry { peer, standing: Standing::Idle, since: number };
        inner.open.insert(number, Open { entry, is_upgraded: false, closed: closed.clone(), standing });
        Some(ConnectionSlot { handle: Handle { connections: self.clone(), number }, closed, standing: seen })
    }
}

/// A connection as seen by its requests.
#[derive(Clone, Debug)]
pub struct Handle {
    connections: Arc<Connections>,
    number: u64,
}

impl Handle {
    /// Notes that a request has arrived. It ends when the returned value is dropped, unless it became a session.
    pub fn begin(&self) -> Underway {
        self.connections.inner.lock().set(self.number, Standing::Unproven);
        Underway(self.clone())
    }

    /// Notes that the connection carries a session from now on.
    pub fn upgraded(&self) {
        if let Some(open) = self.connections.inner.lock().open.get_mut(&self.number) {
            open.is_upgraded = true;
        }
    }

    /// Marks the connection as proven after a valid key or token, so that it is never replaced. Returns false if the
    /// table has no slot for another proven connection.
    pub fn prove(&self) -> bool {
        let mut inner = self.connections.inner.lock();
        let others = inner.open.iter().filter(|(number, _)| **number != self.number);
        let proven = others.filter(|(_, open)| open.entry.standing == Standing::Proven).count();
        let has_room = proven < self.connections.caps.proven();
        if has_room {
            inner.set(self.number, Standing::Proven);
        }
        has_room
    }
}

/// A request whose answer is not fully written yet.
#[derive(Debug)]
pub struct Underway(Handle);

impl Drop for Underway {
    fn drop(&mut self) {
        let Handle { connections, number } = &self.0;
        let mut inner = connections.inner.lock();
        if inner.open.get(number).is_some_and(|open| !open.is_upgraded) {
            inner.set(*number, Standing::Idle);
        }
    }
}

/// The slot of a connection, until it is dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    handle: Handle,
    /// Cancelled when another connection takes the slot.
    pub closed: CancellationToken,
    pub standing: watch::Receiver<Standing>,
}

impl ConnectionSlot {
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Notes that the server has sent everything: the connection may be replaced from now on.
    pub fn ends(&self) {
        self.handle.connections.inner.lock().set(self.handle.number, Standing::Idle);
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.handle.connections.inner.lock().open.remove(&self.handle.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDINGS: [Standing; 3] = [Standing::Idle, Standing::Unproven, Standing::Proven];

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Covers every table of up to four connections of two peers, in every order of age.
    #[test]
    fn a_newcomer_takes_a_free_place_or_that_of_the_oldest_unproven_connection() {
        let kinds = STANDINGS.iter().flat_map(|standing| [(*standing, 1), (*standing, 2)]).collect::<Vec<_>>();
        for total in 1..=4 {
            for per_peer in [None, Some(1), Some(2)] {
                let caps = Caps { total, per_peer };
                for count in 0..=total {
                    for choice in 0..kinds.len().pow(count as u32) {
                        let open: Vec<_> = (0..count as u64)
                            .map(|number| {
                                let (standing, last) = kinds[choice / kinds.len().pow(number as u32) % kinds.len()];
                                (number, Entry { peer: Caller::of(peer(last)), standing, since: number })
                            })
                            .collect();
                        check(caps, &open);
                    }
                }
            }
        }
    }

    fn check(caps: Caps, open: &[(u64, Entry)]) {
        let newcomer = Caller::of(peer(1));
        let is_unproven = |entry: &Entry| entry.standing != Standing::Proven;
        let of_peer = open.iter().filter(|(_, entry)| is_unproven(entry) && entry.peer == newcomer).count();
        let peer_is_full = caps.per_peer.is_some_and(|most| of_peer >= most);
        match admit(caps, newcomer, open.iter().copied()) {
            Verdict::Accept => assert!(!peer_is_full && open.len() < caps.total, "{open:?}"),
            Verdict::Replace(number) => {
                assert!(peer_is_full || open.len() >= caps.total, "nothing is closed without need: {open:?}");
                let (_, closed) = open[number as usize];
                assert!(is_unproven(&closed), "a proven connection is never closed: {open:?}");
                assert!(!peer_is_full || closed.peer == newcomer, "a peer closes its own: {open:?}");
                for (_, entry) in open.iter().filter(|(_, entry)| is_unproven(entry)) {
                    let is_candidate = !peer_is_full || entry.peer == newcomer;
                    let is_better = (entry.standing != Standing::Idle, entry.since)
                        < (closed.standing != Standing::Idle, closed.since);
                    assert!(!(is_candidate && is_better), "{entry:?} before {closed:?}");
                }
            }
            Verdict::Refuse => assert!(!open.iter().any(|(_, entry)| is_unproven(entry)), "{open:?}"),
        }
    }

    #[test]
    fn proven_connections_leave_a_reserve_and_take_it_back_when_they_end() {
        let connections = Connections::new(Caps { total: 4, per_peer: None });
        let places: Vec<_> = (0..4).map(|_| connections.admit(peer(1)).unwrap()).collect();
        let requests: Vec<_> = places.iter().map(|place| place.handle().begin()).collect();
        let proven: Vec<_> = places.iter().map(|place| place.handle().prove()).collect();
        assert_eq!(proven, [true, true, true, false]);
        assert!(places[0].handle().prove(), "it is one of them already");
        let newcomer = connections.admit(peer(2)).expect("the reserve is always there");
        assert!(places[3].closed.is_cancelled() && !newcomer.handle().prove());
        drop(requests);
        assert_eq!(*places[0].standing.borrow(), Standing::Idle);
        assert!(newcomer.handle().prove());
        drop((places, newcomer));
        assert!(connections.inner.lock().open.is_empty());
    }

    #[test]
    fn a_session_outlasts_its_request() {
        let connections = Connections::new(Caps { total: 4, per_peer: None });
        let place = connections.admit(peer(1)).unwrap();
        let request = place.handle().begin();
        place.handle().upgraded();
        assert!(place.handle().prove());
        drop(request);
        assert_eq!(*place.standing.borrow(), Standing::Proven);
        place.ends();
        assert_eq!(*place.standing.borrow(), Standing::Idle);
    }
}
