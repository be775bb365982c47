//! What no honest client sends: a clear answer or a proper close, never a crash.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::frame::{
        Frame,
        coding::{Data, OpCode},
    },
};

use crate::{
    test_server::{World, until},
    wire_client::{Client, V1, connect},
};

#[tokio::test]
async fn what_is_no_message_is_answered_and_ten_of_them_end_the_session() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    let bad = ["", "hello", "[]", "17", "null", "\"x\"", "{\"a\":", deep.as_str(), "{\"a\":1}{}"];
    for text in bad {
        client.says(text).await;
        client.hears("ERROR E").await;
    }
    client.exec("out \"fine\"").await;
    client.hears("EXECUTION_RUNNING out:fine EXECUTION_DONE").await;
    client.socket.send(Message::binary(vec![1; 20])).await.unwrap();
    client.hears("ERROR E close:1007").await;
}

#[tokio::test]
async fn odd_but_whole_messages_are_answered() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let deep = format!("{{\"x\":{}{},\"action\":\"dance\"}}", "[".repeat(200_000), "]".repeat(200_000));
    for text in [
        deep.as_str(),
        r#"{"action":"dance","action":"sing"}"#,
        r#"{"action":"fork","count":123456789012345678901234567890}"#,
        r#"{"action":"ack","exec_id":"a","stdout":1e400}"#,
        r#"{"action":["kill_sandbox"]}"#,
        r#"{"event":{"stdin":1}}"#,
        r#"{"action":"fork"}"#,
        r#"{"\u0000":1}"#,
    ] {
        client.says(text).await;
        let word = client.word().await;
        assert_eq!(word, "ERROR", "{}", &text[..text.len().min(80)]);
        client.hears("E").await;
    }
    client.says(r#"{"language":"bash","code":"exit 1","code":"out \"last\""}"#).await;
    client.hears("EXECUTION_RUNNING out:last EXECUTION_DONE").await;
}

#[tokio::test]
async fn before_the_config_bad_messages_are_answered_too() {
    let world = World::new().await;
    let mut client = Client::create(&world).await;
    client.hears("CREATING").await;
    client.says("nonsense").await;
    client.hears("ERROR E").await;
    client.says("{}").await;
    client.hears("sandbox_id RUNNING").await;
    let mut client = Client::create(&world).await;
    client.hears("CREATING").await;
    for _ in 0..9 {
        client.says("nonsense").await;
        client.hears("ERROR E").await;
    }
    client.socket.send(Message::binary(vec![])).await.unwrap();
    client.hears("ERROR E close:1007").await;
    assert_eq!(world.count(), 1);
}

#[tokio::test]
async fn a_message_that_is_too_long_is_closed_with_its_code() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let (mut sink, stream) = client.socket.split();
    let sending = tokio::spawn(async move {
        // It cannot all be taken; what happens to the sender is no matter.
        let _ = sink.send(Message::text("x".repeat((16 << 20) + 1))).await;
        sink
    });
    assert_eq!(close_code(stream).await, Some(1009));
    sending.abort();
    client = Client::running(&world, "{}").await;
    client.says(&format!("{{\"x\":\"{}\",\"action\":\"dance\"}}", "x".repeat(15 << 20))).await;
    client.hears("ERROR E").await;
}

#[tokio::test]
async fn an_endless_message_is_closed_with_its_code() {
    let world = World::new().await;
    let client = Client::running(&world, "{}").await;
    let (mut sink, stream) = client.socket.split();
    let sending = tokio::spawn(async move {
        let mut code = OpCode::Data(Data::Text);
        let piece = vec![b'x'; 256 << 10];
        while sink.send(Message::Frame(Frame::message(piece.clone(), code, false))).await.is_ok() {
            code = OpCode::Data(Data::Continue);
        }
        sink
    });
    assert_eq!(close_code(stream).await, Some(1009));
    sending.abort();
}

#[tokio::test]
async fn a_message_in_pieces_is_one_message_also_with_a_ping_in_between() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let text = r#"{"language":"bash","code":"out \"whole\""}"#;
    let last = text.len() - 1;
    for (at, byte) in text.bytes().enumerate() {
        let code = OpCode::Data(if at == 0 { Data::Text } else { Data::Continue });
        let piece = Frame::message(vec![byte], code, at == last);
        client.socket.send(Message::Frame(piece)).await.unwrap();
        if at == 7 {
            client.socket.send(Message::Frame(Frame::ping(vec![1]))).await.unwrap();
        }
    }
    client.hears("EXECUTION_RUNNING out:whole EXECUTION_DONE").await;
}

#[tokio::test]
async fn broken_frames_are_closed_with_their_code() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let text = Frame::message(vec![0xff, 0xfe], OpCode::Data(Data::Text), true);
    client.socket.send(Message::Frame(text)).await.unwrap();
    client.hears("close:1007").await;
    let mut client = Client::running(&world, "{}").await;
    let lone = Frame::message(vec![b'x'], OpCode::Data(Data::Continue), true);
    client.socket.send(Message::Frame(lone)).await.unwrap();
    client.hears("close:1002").await;
}

#[tokio::test]
async fn binary_of_another_kind_is_answered_in_v1() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    for bytes in [vec![], vec![0; 12], vec![9; 13], vec![1; 13]] {
        client.socket.send(Message::binary(bytes)).await.unwrap();
        client.hears("ERROR E").await;
    }
    client.socket.send(Message::binary(vec![0; 20])).await.unwrap();
    client.hears("EXECUTION_ERROR E").await;
}

#[tokio::test]
async fn thousands_of_messages_are_all_answered() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let (mut sink, mut stream) = client.socket.split();
    let sending = tokio::spawn(async move {
        for _ in 0..3000 {
            sink.send(Message::text(r#"{"action":"dance"}"#)).await.unwrap();
        }
        sink
    });
    let mut events = 0;
    while events < 6000 {
        let read = tokio::time::timeout(Duration::from_secs(20), stream.next()).await.unwrap();
        if read.unwrap().unwrap().is_text() {
            events += 1;
        }
    }
    client.socket = sending.await.unwrap().reunite(stream).unwrap();
    client.exec("out \"x\"").await;
    client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_flood_of_requests_while_it_starts_waits_in_the_socket() {
    let world = World::new().await;
    world.set(|script| script.start_waits = true);
    let mut client = Client::new(connect(&world, "/create", &V1).await.unwrap());
    client.hears("hello CREATING").await;
    client.says("{}").await;
    for _ in 0..500 {
        client.says(r#"{"action":"dance"}"#).await;
    }
    until(async || !world.records.list(None, 100).await.unwrap().0.is_empty()).await;
    world.set(|script| script.start_waits = false);
    world.bus.wake(&world.records.list(None, 100).await.unwrap().0[0]);
    client.hears("sandbox_id RUNNING").await;
    for _ in 0..500 {
        client.hears("ERROR E").await;
    }
}

#[tokio::test]
async fn who_connects_and_says_nothing_is_closed() {
    use tokio::io::AsyncReadExt;
    let world = World::new().await;
    let mut silent = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let closed = async { silent.read(&mut [0; 16]).await };
    tokio::select! {
        read = closed => assert!(matches!(read, Ok(0) | Err(_)), "{read:?}"),
        () = until(async || {
            world.clock.skip(Duration::from_secs(5));
            false
        }) => panic!("it stays open"),
    }
}

async fn close_code(mut stream: futures::stream::SplitStream<crate::wire_client::Socket>) -> Option<u16> {
    loop {
        let read = tokio::time::timeout(Duration::from_secs(20), stream.next()).await.expect("the server is silent");
        match read {
            Some(Ok(Message::Close(frame))) => return frame.map(|frame| frame.code.into()),
            Some(Ok(_)) => {}
            None | Some(Err(_)) => return None,
        }
    }
}
