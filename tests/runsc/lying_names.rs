//! A name server that answers what a test wants, the truth or not.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, UdpSocket as StdUdpSocket},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::{net::UdpSocket, task::JoinHandle};

use crate::network_fixture::Network;

const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;

/// What is answered about a name. A name without an answer does not exist.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Each query, of addresses of the kind that was asked for, takes the next list; the last one stays.
    Addresses(Vec<Vec<IpAddr>>),
    /// There is no answer at all.
    Silence,
    /// The name server has failed.
    Failure,
}

#[derive(Debug, Default)]
struct Book {
    answers: BTreeMap<String, Answer>,
    /// Every name that was asked for, with the type.
    asked: Vec<(String, u16)>,
}

#[derive(Debug)]
pub struct LyingNames {
    book: Arc<Mutex<Book>>,
    task: JoinHandle<()>,
}

impl LyingNames {
    pub fn start(network: &Network, address: Ipv4Addr) -> Self {
        let socket = network.within(|| StdUdpSocket::bind((address, 53)).unwrap());
        socket.set_nonblocking(true).unwrap();
        let socket = UdpSocket::from_std(socket).unwrap();
        let book = Arc::new(Mutex::new(Book::default()));
        let task = tokio::spawn(serve(socket, book.clone()));
        Self { book, task }
    }

    pub fn set(&self, name: &str, answer: Answer) {
        self.book.lock().answers.insert(name.to_owned(), answer);
    }

    /// A name that always has these addresses.
    pub fn add(&self, name: &str, addresses: &[&str]) {
        self.add_changing(name, &[addresses]);
    }

    /// A name that has other addresses whenever it is asked for.
    pub fn add_changing(&self, name: &str, lists: &[&[&str]]) {
        let parse = |list: &&[&str]| list.iter().map(|address| address.parse().unwrap()).collect();
        self.set(name, Answer::Addresses(lists.iter().map(parse).collect()));
    }

    /// How often the IPv4 addresses of a name were asked for.
    pub fn times_asked(&self, name: &str) -> usize {
        self.book.lock().asked.iter().filter(|(asked, kind)| asked == name && *kind == TYPE_A).count()
    }
}

impl Drop for LyingNames {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(socket: UdpSocket, book: Arc<Mutex<Book>>) {
    let mut buffer = [0; 1500];
    loop {
        let (count, from) = socket.recv_from(&mut buffer).await.unwrap();
        let Some(answer) = answer(&buffer[..count], &mut book.lock()) else { continue };
        let _ = socket.send_to(&answer, from).await;
    }
}

/// The answer to one query; `None` for silence.
fn answer(query: &[u8], book: &mut Book) -> Option<Vec<u8>> {
    let (name, end) = question(query)?;
    let kind = u16::from_be_bytes([*query.get(end)?, *query.get(end + 1)?]);
    let asked = book.asked.iter().filter(|asked| asked.0 == name && asked.1 == kind).count();
    book.asked.push((name.clone(), kind));
    let (code, addresses) = match book.answers.get(&name) {
        None => (3, vec![]),
        Some(Answer::Failure) => (2, vec![]),
        Some(Answer::Silence) => return None,
        Some(Answer::Addresses(lists)) => (0, lists[asked.min(lists.len() - 1)].clone()),
    };
    let addresses: Vec<Vec<u8>> = addresses
        .into_iter()
        .filter_map(|address| match address {
            IpAddr::V4(address) if kind == TYPE_A => Some(address.octets().to_vec()),
            IpAddr::V6(address) if kind == TYPE_AAAA => Some(address.octets().to_vec()),
            IpAddr::V4(_) | IpAddr::V6(_) => None,
        })
        .collect();
    let mut message = query[..2].to_vec();
    message.extend([0x85, 0x80 | code, 0, 1, 0, u8::try_from(addresses.len()).unwrap(), 0, 0, 0, 0]);
    message.extend(&query[12..end + 4]);
    for address in addresses {
        // The name of the question, its type, class IN, a time to live of nothing.
        message.extend([0xc0, 12]);
        message.extend(kind.to_be_bytes());
        message.extend([0, 1, 0, 0, 0, 0, 0, u8::try_from(address.len()).unwrap()]);
        message.extend(address);
    }
    Some(message)
}

/// The name of the question in lower case, and where it ends.
fn question(query: &[u8]) -> Option<(String, usize)> {
    let (mut labels, mut at) = (vec![], 12);
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        labels.push(String::from_utf8_lossy(query.get(at..at + length)?).to_ascii_lowercase());
        at += length;
    }
}
