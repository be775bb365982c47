//! The frames between server and agent, byte for byte: they lie inside checkpoints.

#![allow(clippy::unwrap_used)]

use baton_protocol::{
    agent::{
        AgentExec, AgentState, Assign, Dial, Exit, Hello, ListeningPorts, NameResolution, NetworkAccess, Relieve,
        Restored, Resync,
    },
    frame::{Broken, Decoder, Frame, FrameKind, HEADER, MAX_PAYLOAD, Stream},
};
use proptest::prelude::*;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

#[derive(Deserialize)]
struct Fixture {
    kind: String,
    number: u8,
    stream: String,
    exec: u32,
    offset: u64,
    sequence: u64,
    payload: String,
    /// The whole frame, in hex.
    bytes: String,
}

/// `StdinEof` lies in `stdin-eof.json`.
fn fixture(kind: FrameKind) -> Fixture {
    let mut name = String::new();
    for letter in format!("{kind:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
    }
    let path = format!("{}/fixtures/frames/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(&path).expect(&path)).expect(&path)
}

fn from_hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

#[test]
fn every_kind_is_written_and_read_as_its_fixture_says() {
    for kind in FrameKind::ALL {
        let fixture = fixture(kind);
        assert_eq!((fixture.kind.as_str(), fixture.number), (format!("{kind:?}").as_str(), kind as u8));
        let stream = Stream::ALL.into_iter().find(|stream| format!("{stream:?}") == fixture.stream).unwrap();
        let frame = Frame::new(kind)
            .stream(stream)
            .exec(fixture.exec)
            .offset(fixture.offset)
            .sequence(fixture.sequence)
            .payload(fixture.payload);
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert_eq!(bytes, from_hex(&fixture.bytes), "{kind:?}");
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        assert_eq!(decoder.next_frame(), Ok(Some(frame)), "{kind:?}");
        assert_eq!(decoder.next_frame(), Ok(None));
        assert_eq!(FrameKind::from_number(kind as u8), Some(kind));
    }
}

fn reads_and_writes<T: DeserializeOwned + Serialize>(kind: FrameKind) {
    let text = fixture(kind).payload;
    let value: T = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&value).unwrap(), text, "{kind:?}");
}

#[test]
fn every_payload_of_json_is_read_and_written_without_loss() {
    reads_and_writes::<Assign>(FrameKind::Assign);
    reads_and_writes::<AgentExec>(FrameKind::Exec);
    reads_and_writes::<Resync>(FrameKind::Resync);
    reads_and_writes::<Restored>(FrameKind::Restored);
    reads_and_writes::<Restored>(FrameKind::Forked);
    reads_and_writes::<Relieve>(FrameKind::Relieve);
    reads_and_writes::<Hello>(FrameKind::Hello);
    reads_and_writes::<Exit>(FrameKind::Exit);
    reads_and_writes::<AgentState>(FrameKind::ResyncAck);
    reads_and_writes::<AgentState>(FrameKind::Execs);
    reads_and_writes::<NetworkAccess>(FrameKind::Network);
    reads_and_writes::<NameResolution>(FrameKind::Resolved);
    reads_and_writes::<Dial>(FrameKind::Dial);
    reads_and_writes::<ListeningPorts>(FrameKind::Ports);
}

#[test]
fn a_payload_of_a_later_version_is_still_understood() {
    let text = r#"{"exec_id":"e","argv":["true"],"new":{"field":1}}"#;
    assert_eq!(serde_json::from_str::<AgentExec>(text).unwrap().argv, ["true"]);
}

#[test]
fn a_frame_of_an_unknown_kind_is_passed_over() {
    let mut bytes = Vec::new();
    Frame::new(FrameKind::Ping).sequence(1).encode(&mut bytes);
    bytes[5] = 200;
    let crc = crc32c::crc32c(&bytes[..28]);
    bytes[28..32].copy_from_slice(&crc.to_le_bytes());
    Frame::new(FrameKind::Ping).sequence(2).encode(&mut bytes);
    let mut decoder = Decoder::default();
    decoder.push(&bytes);
    assert_eq!(decoder.next_frame().unwrap().map(|frame| frame.sequence), Some(2));
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_anything_is_kept() {
    let mut decoder = Decoder::default();
    decoder.push(&[0xff; HEADER]);
    assert_eq!(decoder.next_frame(), Err(Broken::TooLong(u32::MAX)));
    assert_eq!(decoder.pending().len(), HEADER);
    let mut bytes = Vec::new();
    Frame::new(FrameKind::Data).payload(vec![1; MAX_PAYLOAD]).encode(&mut bytes);
    let mut decoder = Decoder::default();
    decoder.push(&bytes);
    assert_eq!(decoder.next_frame().unwrap().map(|frame| frame.payload.len()), Some(MAX_PAYLOAD));
}

#[test]
fn the_rest_of_a_long_frame_is_read_to_where_it_stays() {
    let frame = |kind: FrameKind| Frame::new(kind).stream(Stream::Stdout).exec(7).offset(9).sequence(3);
    let payload: Vec<u8> = (0..100_000u32).map(|at| at as u8).collect();
    let mut bytes = Vec::new();
    frame(FrameKind::Data).payload(payload.clone()).encode(&mut bytes);
    let (begun, rest) = bytes.split_at(5000);
    let mut decoder = Decoder::default();
    decoder.push(begun);
    assert_eq!(decoder.next_frame(), Ok(None));
    let mut long = decoder.take_long().expect("it is long");
    assert_eq!((long.missing(), decoder.pending().len()), (rest.len(), 0));
    long.payload().extend_from_slice(rest);
    assert_eq!((long.missing(), long.finish()), (0, Ok(Some(frame(FrameKind::Data).payload(payload)))));

    // Put back, it is what it was.
    decoder.push(begun);
    let mut long = decoder.take_long().expect("it is long");
    long.payload().extend_from_slice(&rest[..10]);
    decoder.put_back(long);
    assert_eq!(decoder.pending(), &bytes[..5010]);
    decoder.push(&rest[10..]);
    assert!(decoder.next_frame().unwrap().is_some());

    // Damage is seen, and nothing else is taken for one.
    let mut damaged = Decoder::default();
    damaged.push(begun);
    let mut long = damaged.take_long().expect("it is long");
    long.payload().extend(rest.iter().map(|byte| !byte));
    assert_eq!(long.finish(), Err(Broken::Checksum));
    for other in [frame(FrameKind::Data).payload(vec![1; 1000]), frame(FrameKind::Log).payload(vec![1; 100_000])] {
        let mut bytes = Vec::new();
        other.encode(&mut bytes);
        let mut decoder = Decoder::default();
        decoder.push(&bytes[..bytes.len() / 2]);
        assert!(decoder.take_long().is_none());
    }
    assert!(Decoder::default().take_long().is_none());
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let kind = prop::sample::select(&FrameKind::ALL[..]);
    let stream = prop::sample::select(&Stream::ALL[..]);
    let payload = prop::collection::vec(any::<u8>(), 0..200);
    (kind, stream, any::<u32>(), any::<u64>(), any::<u64>(), payload).prop_map(
        |(kind, stream, exec, offset, sequence, payload)| Frame { kind, stream, exec, offset, sequence, payload },
    )
}

fn all_of(decoder: &mut Decoder) -> (Vec<Frame>, Option<Broken>) {
    let mut frames = Vec::new();
    loop {
        match decoder.next_frame() {
            Ok(Some(frame)) => frames.push(frame),
            Ok(None) => return (frames, None),
            Err(broken) => return (frames, Some(broken)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn frames_survive_any_division_into_pieces(
        frames in prop::collection::vec(any_frame(), 0..8),
        pieces in prop::collection::vec(1usize..80, 1..40),
    ) {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.encode(&mut bytes));
        let (mut decoder, mut got, mut rest) = (Decoder::default(), Vec::new(), &bytes[..]);
        for piece in pieces.into_iter().cycle() {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            decoder.push(now);
            let (frames, broken) = all_of(&mut decoder);
            prop_assert_eq!(broken, None);
            got.extend(frames);
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(got, frames);
        prop_assert!(decoder.pending().is_empty());
    }

    #[test]
    fn one_changed_bit_is_always_noticed_or_waited_for(
        frames in prop::collection::vec(any_frame(), 1..5),
        place in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        for frame in &frames {
            frame.encode(&mut bytes);
            ends.push(bytes.len());
        }
        let at = place.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        let (got, _) = all_of(&mut decoder);
        let whole = ends.iter().filter(|end| **end <= at).count();
        prop_assert_eq!(&got[..], &frames[..whole]);
    }

    #[test]
    fn garbage_is_never_believed_and_the_marker_is_found_in_it(
        garbage in prop::collection::vec(any::<u8>(), 0..400),
        marker in any::<[u8; 16]>(),
        after in prop::collection::vec(any::<u8>(), 0..50),
        limit in 0usize..500,
    ) {
        let mut decoder = Decoder::default();
        decoder.push(&garbage);
        let (frames, _) = all_of(&mut decoder);
        prop_assert!(frames.is_empty());
        prop_assert!(!matches!(decoder.next_frame_within(limit), Ok(Some(_))));
        decoder.push(&marker);
        decoder.push(&after);
        let at = decoder.find(&marker).unwrap();
        prop_assert!(at <= garbage.len());
        decoder.skip(at + marker.len());
        prop_assert!(decoder.pending().ends_with(&after));
    }

    #[test]
    fn a_frame_beyond_the_limit_is_left_alone(frames in prop::collection::vec(any_frame(), 1..5), limit in 0usize..600) {
        let (mut decoder, mut ends) = (Decoder::default(), Vec::new());
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.encode(&mut bytes);
            ends.push(bytes.len());
        }
        decoder.push(&bytes);
        let mut taken = 0;
        while let Ok(Some(frame)) = decoder.next_frame_within(limit - limit.min(bytes.len() - decoder.pending().len())) {
            prop_assert_eq!(&frame, &frames[taken]);
            taken += 1;
        }
        prop_assert_eq!(taken, ends.iter().filter(|end| **end <= limit).count());
    }
}
