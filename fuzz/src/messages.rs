//! Messages between a client and the server, in both directions.

use baton_protocol::{
    binary::{BinaryChunk, wrap},
    event::Event,
    request::{Request, SandboxConfig},
};

pub fn client_messages(data: &[u8]) {
    if let Ok(chunk) = BinaryChunk::decode(data) {
        assert_eq!(chunk.encode(), data);
        assert_eq!(wrap(chunk.stream, chunk.exec, chunk.offset, chunk.payload.to_vec()), data);
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Request::parse(text) {
        Ok(request) => {
            let written = request.to_json();
            let again = Request::parse(&written).expect("what was written can be read");
            assert!(request == again, "{written}");
        }
        // It quotes what it refuses, and a client's terminal shows it.
        Err(refusal) => {
            let is_plain = refusal.message.chars().all(|letter| !letter.is_control());
            assert!(is_plain && refusal.message.len() < 1000, "{:?}", refusal.message);
        }
    }
    // What a server says may be hostile too.
    if let Ok(event) = Event::parse(text) {
        assert_eq!(Event::parse(&event.to_json()).expect("what was written can be read"), event);
    }
    let query: Vec<(String, String)> = text
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let _ = SandboxConfig::from_query(&query);
}
