//! ZeroMQ: our publisher with our subscriber and with the `zeromq` crate's sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;

use slipstream_config::cluster::{EventBus, EventsConfig};
use slipstream_events::zmq::{ZmqSubscriber, replay};
use slipstream_events::{EventPlane, FpmMessage, KvEventBatch, PlaneOptions};
use slipstream_planes::EventSink;
use zeromq::{Socket, SocketRecv, SocketSend};

use super::{ROOT, config, in_time, pass, rank, runtime, start, stores, wait_until};

fn endpoint(address: SocketAddr) -> String {
    format!("tcp://{address}")
}

/// Publishes passes of worker 0 until `recv` has one: then the subscription is active. Returns the
/// number of the next pass, and the received message.
macro_rules! until_heard {
    ($publisher:expr, $recv:expr) => {{
        let mut counter = 0;
        loop {
            $publisher.on_fpm(&pass(0, counter));
            $publisher.flush();
            counter += 1;
            let wait = std::time::Duration::from_millis(20);
            if let Ok(message) = tokio::time::timeout(wait, $recv).await {
                break (counter, message);
            }
        }
    }};
}

#[test]
fn the_zeromq_crate_hears_every_pass_of_the_topic_that_it_asks_for() {
    let (plane, mut publisher) = start(&config(EventBus::Zmq), false);
    runtime().block_on(async {
        let mut socket = zeromq::SubSocket::new();
        let address = endpoint(plane.addresses().fpm.unwrap());
        socket.connect(&address).await.unwrap();
        socket.subscribe("slipstream.fpm.w0.").await.unwrap();
        let (next, _) = until_heard!(publisher, socket.recv());
        for counter in next..next + 1000 {
            publisher.on_fpm(&pass(0, counter));
            publisher.on_fpm(&pass(1, counter)); // not asked for
        }
        publisher.flush();
        let mut expected = None;
        while expected != Some(next + 1000) {
            let message = in_time("the next pass", socket.recv()).await.unwrap();
            let [topic, sequence, payload] = &message.into_vec()[..] else {
                panic!("an event has three frames")
            };
            assert_eq!(topic, "slipstream.fpm.w0.0");
            let fpm = FpmMessage::decode(payload).unwrap();
            assert_eq!(sequence[..], fpm.counter_id.to_be_bytes());
            assert_eq!(*expected.get_or_insert(fpm.counter_id), fpm.counter_id);
            expected = Some(fpm.counter_id + 1);
        }
    });
}

#[test]
fn our_subscriber_hears_the_zeromq_crate_and_refuses_what_is_no_event() {
    runtime().block_on(async {
        let mut socket = zeromq::PubSocket::new();
        let bound = socket.bind("tcp://127.0.0.1:0").await.unwrap();
        let mut subscriber = ZmqSubscriber::connect(&bound.to_string(), "t")
            .await
            .unwrap();
        let mut message = zeromq::ZmqMessage::from("topic");
        message.push_back(5u64.to_be_bytes().to_vec().into());
        message.push_back(vec![0xc0].into());
        let odd = zeromq::ZmqMessage::from("two frames are too few");
        let event = loop {
            socket.send(message.clone()).await.unwrap();
            let wait = std::time::Duration::from_millis(20);
            if let Ok(event) = tokio::time::timeout(wait, subscriber.recv()).await {
                break event.unwrap();
            }
        };
        assert_eq!((&event.topic[..], event.sequence), (&b"topic"[..], Some(5)));
        socket.send(odd).await.unwrap();
        let error = loop {
            match in_time("the odd message", subscriber.recv()).await {
                Ok(_) => {} // sent while we waited
                Err(error) => break error,
            }
        };
        assert!(error.may_go_on());
        assert!(
            error.to_string().contains("frames of [22] bytes"),
            "{error}"
        );
    });
}

#[test]
fn kv_events_lie_at_a_port_a_rank_and_are_replayed_up_to_the_end_marker() {
    let (plane, mut publisher) = start(&config(EventBus::Zmq), false);
    let addresses = plane.addresses().clone();
    assert_eq!((addresses.kv.len(), addresses.replay.len()), (2, 2));
    for n in 0..20 {
        publisher.on_kv(&stores(0, n, 1));
        publisher.on_kv(&stores(1, 100 + n, 1));
    }
    publisher.flush();
    let counts = plane.counts();
    let sent = || counts.bus().kv_sent.load(Ordering::Relaxed);
    wait_until("40 batches sent", || sent() == 40);
    runtime().block_on(async {
        for (worker, first) in [(0, 0), (1, 100)] {
            let address = endpoint(addresses.replay[worker]);
            let events = in_time("replay", replay(&address, 15)).await.unwrap();
            let found: Vec<Option<u64>> = events.iter().map(|event| event.sequence).collect();
            assert_eq!(found, (15..20).map(Some).collect::<Vec<_>>());
            let batch = KvEventBatch::decode(&events[0].payload).unwrap();
            let expected = format!("Int({})", 1000 + first + 15);
            assert!(format!("{batch:?}").contains(&expected), "{batch:?}");
        }
        // As vLLM's consumers ask: a DEALER, with the empty frame of a request.
        let mut dealer = zeromq::DealerSocket::new();
        dealer
            .connect(&endpoint(addresses.replay[0]))
            .await
            .unwrap();
        let mut request = zeromq::ZmqMessage::from("");
        request.push_back(18u64.to_be_bytes().to_vec().into());
        dealer.send(request).await.unwrap();
        let mut found = Vec::new();
        loop {
            let message = in_time("a replayed batch", dealer.recv()).await.unwrap();
            let [empty, topic, sequence, payload] = &message.into_vec()[..] else {
                panic!("four frames")
            };
            assert!(empty.is_empty() && topic.is_empty());
            let sequence = i64::from_be_bytes(sequence[..].try_into().unwrap());
            found.push(sequence);
            if sequence == -1 {
                assert!(payload.is_empty());
                break;
            }
        }
        assert_eq!(found, [18, 19, -1]);
        // A malformed request is counted, and the next one answered.
        dealer
            .send(zeromq::ZmqMessage::from("what?"))
            .await
            .unwrap();
        let mut request = zeromq::ZmqMessage::from("");
        request.push_back(20u64.to_be_bytes().to_vec().into());
        dealer.send(request).await.unwrap();
        let message = in_time("the end marker", dealer.recv()).await.unwrap();
        assert_eq!(message.get(2).unwrap()[..], [0xff; 8]);
        assert_eq!(counts.bus().bad_replays.load(Ordering::Relaxed), 1);
        assert_eq!(counts.bus().replays.load(Ordering::Relaxed), 4);
    });
}

#[test]
fn a_replay_is_read_with_topics_and_without() {
    let frames = |parts: &[&[u8]]| {
        let mut message = zeromq::ZmqMessage::from(parts[0].to_vec());
        for part in &parts[1..] {
            message.push_back(part.to_vec().into());
        }
        message
    };
    runtime().block_on(async {
        let mut socket = zeromq::RouterSocket::new();
        let bound = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        for topic in [None, Some("kv@pod")] {
            let asked = tokio::spawn({
                let bound = bound.clone();
                async move { replay(&bound, 7).await }
            });
            let request = in_time("a request", socket.recv()).await.unwrap();
            let [id, empty, start] = &request.into_vec()[..] else {
                panic!("three frames")
            };
            assert_eq!((empty.len(), &start[..]), (0, &7u64.to_be_bytes()[..]));
            for (sequence, payload) in [(7, &b"p"[..]), (u64::MAX, b"")] {
                let mut parts = vec![&id[..], b""];
                parts.extend(topic.map(|topic| {
                    if payload.is_empty() {
                        b""
                    } else {
                        topic.as_bytes()
                    }
                }));
                let sequence = sequence.to_be_bytes();
                parts.extend([&sequence[..], payload]);
                socket.send(frames(&parts)).await.unwrap();
            }
            let events = in_time("the replay", asked).await.unwrap().unwrap();
            let [event] = &events[..] else {
                panic!("{events:?}")
            };
            assert_eq!(event.topic, topic.unwrap_or_default());
            assert_eq!((event.sequence, &event.payload[..]), (Some(7), &b"p"[..]));
        }
    });
}

#[test]
fn replay_forgets_the_oldest() {
    let config = EventsConfig {
        replay_batches_max: 3,
        ..config(EventBus::Zmq)
    };
    let (plane, mut publisher) = start(&config, false);
    for n in 0..10 {
        publisher.on_kv(&stores(0, n, 1));
    }
    publisher.flush();
    let counts = plane.counts();
    let sent = || counts.bus().kv_sent.load(Ordering::Relaxed);
    wait_until("10 batches sent", || sent() == 10);
    let address = endpoint(plane.addresses().replay[0]);
    let events = runtime().block_on(replay(&address, 0)).unwrap();
    let found: Vec<u64> = events.iter().filter_map(|event| event.sequence).collect();
    assert_eq!(found, [7, 8, 9]);
}

#[test]
fn a_subscriber_that_never_reads_loses_the_oldest_and_holds_up_nobody() {
    let config = EventsConfig {
        queue_bytes_max: 256 << 10,
        interval_ms: 0.0,
        ..config(EventBus::Zmq)
    };
    let (plane, mut publisher) = start(&config, false);
    let address = endpoint(plane.addresses().fpm.unwrap());
    let counts = plane.counts();
    let dropped = || counts.bus().subscriber_dropped.load(Ordering::Relaxed);
    runtime().block_on(async {
        let mut slow = ZmqSubscriber::connect(&address, "").await.unwrap();
        let (mut counter, first) = until_heard!(publisher, slow.recv());
        let first = FpmMessage::decode(&first.unwrap().payload)
            .unwrap()
            .counter_id;
        let dropped_before = dropped() + counts.queues()[0].1;
        // Now it stops reading: kernel buffers fill, then ours.
        wait_until("events dropped for it", || {
            for _ in 0..100 {
                publisher.on_fpm(&pass(0, counter));
                publisher.flush();
                counter += 1;
            }
            dropped() > 1000
        });
        let last = counter;
        for _ in 0..10 {
            publisher.on_fpm(&pass(0, counter));
            counter += 1;
        }
        publisher.flush();
        // When it reads again: whole events in order, with gaps as counted, up to the newest.
        let (mut found, mut lost, mut previous) = (0u64, 0, first);
        while previous < last + 9 {
            let event = in_time("events after a pause", slow.recv()).await.unwrap();
            let fpm = FpmMessage::decode(&event.payload).unwrap();
            assert!(previous < fpm.counter_id);
            lost += fpm.counter_id - (previous + 1);
            previous = fpm.counter_id;
            found += 1;
        }
        let queue_dropped = counts.queues()[0].1;
        assert_eq!(
            lost,
            dropped() + queue_dropped - dropped_before,
            "each gap is a drop that was counted"
        );
        assert!(found > 10);
    });
}

#[test]
fn peers_that_do_not_speak_zeromq_are_cut_and_counted() {
    let (plane, mut publisher) = start(&config(EventBus::Zmq), false);
    let address = plane.addresses().fpm.unwrap();
    let counts = plane.counts();
    let bad = || counts.bus().bad_peers.load(Ordering::Relaxed);
    let read_to_end = |mut stream: TcpStream| {
        let mut rest = Vec::new();
        // Reset or closed: either way it is over.
        let _ = stream.read_to_end(&mut rest);
    };
    let mut http = TcpStream::connect(address).unwrap();
    let head = "GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: something that is long enough\r\n\r\n";
    http.write_all(head.as_bytes()).unwrap();
    read_to_end(http);
    wait_until("an HTTP client counted", || bad() == 1);
    // A greeting, and then a frame of excessive size.
    let mut greedy = TcpStream::connect(address).unwrap();
    let mut bytes = [0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    greedy.write_all(&bytes).unwrap();
    greedy.write_all(&[6, 0xff, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    read_to_end(greedy);
    wait_until("a greedy peer counted", || bad() == 2);
    // A connection closed within a greeting is not counted.
    drop(TcpStream::connect(address).unwrap());
    runtime().block_on(async {
        let mut subscriber = ZmqSubscriber::connect(&endpoint(address), "")
            .await
            .unwrap();
        let _ = until_heard!(publisher, subscriber.recv());
    });
    assert_eq!(bad(), 2);
}

#[test]
fn a_taken_port_is_an_error_that_names_the_key() {
    let (plane, _publisher) = start(&config(EventBus::Zmq), false);
    let config = EventsConfig {
        fpm_endpoint: endpoint(plane.addresses().fpm.unwrap()),
        ..config(EventBus::Zmq)
    };
    let options = PlaneOptions {
        ranks: vec![(rank(0), 0)],
        threads: 1,
        block_size: 2,
        root: ROOT,
        fresh_buffers: false,
    };
    let error = EventPlane::start(&config, &options)
        .unwrap_err()
        .to_string();
    assert!(error.contains("live.events.fpm_endpoint"), "{error}");
}
