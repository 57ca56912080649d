//! Endpoints against each other, and against misbehaving peers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use slipstream_base::SimTime;
use slipstream_base::mix::draw;
use slipstream_kvindex::{Change, KeySet, PeerIndex, digest};

use super::conn::Scheme;
use super::endpoint::hello;
use super::pull::Pulls;
use super::*;
use crate::clock;
use crate::handshake::Profile;
use crate::nixl::{NixlError, NixlOptions, OneSided, ReadState, Span, Ticket};
use crate::tier::Tier;
use crate::tier::memory::{MemoryOptions, MemoryTier};
use crate::wire::{Answer, Blocks, FrameKind, Get, HEADER_BYTES, Wanted, frame, read_frame};

const BLOCK: usize = 40_000;
const LONG: Duration = Duration::from_secs(20);

fn profile() -> Profile {
    Profile {
        model: "m".into(),
        block_size: 16,
        ..Profile::default()
    }
}

fn block(n: u64) -> Vec<u8> {
    (0..BLOCK as u64 / 8)
        .flat_map(|word| draw(n, word).to_le_bytes())
        .collect()
}

fn key(n: u64) -> Vec<u8> {
    let mut key = vec![5; 36];
    key[..8].copy_from_slice(&n.to_le_bytes());
    key
}

/// A tier with blocks `0..blocks`, all of which it may lend.
fn tier(blocks: u64) -> Arc<MemoryTier> {
    tier_of(blocks, 2 * blocks as usize + 1)
}

/// A tier of `slots` slots with blocks `0..blocks`.
fn tier_of(blocks: u64, slots: usize) -> Arc<MemoryTier> {
    let tier = MemoryTier::new(MemoryOptions {
        bytes: slots * BLOCK,
        block_bytes: BLOCK,
        ttl_ns: None,
    })
    .unwrap();
    for n in 0..blocks {
        tier.put(clock::now(), &key(n), &block(n)).unwrap();
    }
    tier
}

fn any_tcp() -> Address {
    "tcp://127.0.0.1:0".parse().unwrap()
}

fn any_nixl() -> Address {
    "nixl://127.0.0.1:0".parse().unwrap()
}

/// Starts an endpoint that reads by NIXL if `SLIPSTREAM_NIXL_LIBRARY` is set, and otherwise by a
/// [`FakeNixl`].
fn start(options: EndpointOptions) -> BlockEndpoint {
    match std::env::var_os("SLIPSTREAM_NIXL_LIBRARY") {
        Some(library) => BlockEndpoint::start(EndpointOptions {
            nixl: Nixl::On(NixlOptions {
                staging_bytes: 4 << 20,
                ..NixlOptions::new(library.as_ref())
            }),
            ..options
        })
        .unwrap(),
        None => start_with_fake(options, &Arc::default()),
    }
}

/// Starts an endpoint that reads by a [`FakeNixl`]; four slots, one of them per peer.
fn start_with_fake(options: EndpointOptions, switch: &Arc<Switch>) -> BlockEndpoint {
    let stand = FakeNixl {
        switch: Arc::clone(switch),
        reads: Vec::new(),
    };
    let served = options.serves.as_ref().map(|tier| Arc::clone(tier.arena()));
    let pulls = Pulls::new(Box::new(stand), &Region::new(4 << 20), served).unwrap();
    let options = EndpointOptions {
        nixl: Nixl::Keys,
        ..options
    };
    BlockEndpoint::start_with(options, Some(pulls)).unwrap()
}

/// A server that peers read by a [`FakeNixl`] only.
fn fake_nixl_server(tier: &Arc<MemoryTier>) -> BlockEndpoint {
    let options = EndpointOptions {
        listen: vec![any_nixl()],
        serves: Some(Arc::clone(tier)),
        ..EndpointOptions::new("server", profile())
    };
    start_with_fake(options, &Arc::default())
}

/// The behavior of reads.
#[derive(Default)]
struct Switch {
    /// Reads stay in flight.
    held: AtomicBool,
    /// Reads fail.
    failing: AtomicBool,
    posted: AtomicUsize,
    ended: AtomicUsize,
}

/// Replaces NIXL between endpoints of one process, and lets a test hold or fail reads.
struct FakeNixl {
    switch: Arc<Switch>,
    /// By ticket; `None` once ended.
    reads: Vec<Option<Vec<Span>>>,
}

impl OneSided for FakeNixl {
    fn introduction(&mut self) -> Result<Vec<u8>, NixlError> {
        Ok(format!("{:p}", Arc::as_ptr(&self.switch)).into())
    }

    fn load_peer(&mut self, introduction: &[u8]) -> Result<String, NixlError> {
        Ok(String::from_utf8(introduction.to_vec()).unwrap())
    }

    fn unload_peer(&mut self, _peer: &str) {}

    unsafe fn read(&mut self, _peer: &str, spans: &[Span]) -> Result<Ticket, NixlError> {
        self.switch.posted.fetch_add(1, Ordering::SeqCst);
        self.reads.push(Some(spans.to_vec()));
        Ok(Ticket(self.reads.len() - 1))
    }

    fn poll(&mut self, ticket: Ticket) -> ReadState {
        if self.switch.held.load(Ordering::SeqCst) {
            return ReadState::InFlight;
        }
        let spans = self.reads[ticket.0]
            .take()
            .expect("a ticket is polled once after its end");
        self.switch.ended.fetch_add(1, Ordering::SeqCst);
        if self.switch.failing.load(Ordering::SeqCst) {
            return ReadState::Failed;
        }
        for span in spans {
            // SAFETY: `to` is the slot of this read, and `from` a pinned block in a tier of this
            // process that a test keeps alive.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    span.from as *const u8,
                    span.to as *mut u8,
                    span.bytes,
                );
            }
        }
        ReadState::Done
    }

    fn progress(&mut self) {}
}

/// Runs `check` with one listening address of each kind.
fn on_each(check: impl Fn(Address)) {
    check(any_tcp());
    check(any_nixl());
    let folder = tempfile::tempdir().unwrap();
    check(Address::Unix(folder.path().join("kv")));
}

fn server(at: Address, tier: &Arc<MemoryTier>) -> BlockEndpoint {
    start(EndpointOptions {
        listen: vec![at],
        serves: Some(Arc::clone(tier)),
        ..EndpointOptions::new("server", profile())
    })
}

fn client() -> BlockEndpoint {
    start(EndpointOptions::new("client", profile()))
}

/// Polls until `f` accepts an event; other events are dropped.
fn wait<T>(endpoint: &BlockEndpoint, mut f: impl FnMut(&TransportEvent) -> Option<T>) -> T {
    let until = Instant::now() + LONG;
    let mut events = Vec::new();
    loop {
        assert!(Instant::now() < until, "no event in time");
        events.clear();
        if endpoint.poll(1, &mut events) == 0 {
            std::thread::yield_now();
        }
        if let Some(found) = events.first().and_then(&mut f) {
            return found;
        }
    }
}

fn up(endpoint: &BlockEndpoint, address: &Address) -> PeerId {
    let dialed = endpoint.connect(address).unwrap();
    wait(endpoint, |event| match event {
        TransportEvent::Up { peer, .. } => {
            assert_eq!(*peer, dialed);
            Some(dialed)
        }
        TransportEvent::Down { why, .. } => panic!("{why}"),
        TransportEvent::Done(_) => None,
    })
}

fn down(endpoint: &BlockEndpoint) -> (String, bool) {
    wait(endpoint, |event| match event {
        TransportEvent::Down { why, refused, .. } => Some((why.clone(), *refused)),
        _ => None,
    })
}

fn done(endpoint: &BlockEndpoint, id: TransferId) -> Completion {
    wait(endpoint, |event| match event {
        TransportEvent::Done(done) if done.transfer == id => Some(done.clone()),
        _ => None,
    })
}

/// Fetches `(block, length)` each, into places of `BLOCK` bytes.
fn fetch(
    endpoint: &BlockEndpoint,
    peer: PeerId,
    region: &Arc<Region>,
    wanted: &[(u64, usize)],
    deadline: Duration,
) -> Completion {
    let keys: Vec<_> = wanted.iter().map(|&(n, _)| key(n)).collect();
    let blocks: Vec<_> = keys
        .iter()
        .zip(wanted)
        .enumerate()
        .map(|(at, (key, &(_, len)))| Fetch {
            key,
            at: at * BLOCK,
            len,
        })
        .collect();
    let id = endpoint.fetch(peer, region, &blocks, deadline).unwrap();
    done(endpoint, id)
}

#[test]
fn blocks_stored_after_stop_serving_are_not_served() {
    on_each(|at| {
        let memory = tier(3);
        let folder = tempfile::tempdir().unwrap();
        let options = crate::DiskOptions::new(folder.path(), 1 << 30);
        let disk = crate::DiskTier::open(clock::now(), clock::unix_ns(), options).unwrap();
        disk.put(clock::now(), &key(7), &block(7)).unwrap();
        let server = start(EndpointOptions {
            listen: vec![at],
            serves: Some(Arc::clone(&memory)),
            lower: vec![disk],
            ..EndpointOptions::new("server", profile())
        });
        let client = client();
        let peer = up(&client, &server.addresses()[0]);
        let region = Region::new(BLOCK);
        let before = fetch(&client, peer, &region, &[(0, BLOCK)], LONG);
        assert!(before.failed.is_empty(), "{before:?}");
        server.stop_serving();
        memory.clear();
        memory.put(clock::now(), &key(0), &block(1)).unwrap();
        for n in [0, 7] {
            let after = fetch(&client, peer, &region, &[(n, BLOCK)], LONG);
            assert_eq!(after.failed, [(0, FetchError::Absent)]);
        }
        assert_eq!(memory.len_of(clock::now(), &key(7)), None, "nor from disk");
    });
}

#[test]
fn blocks_arrive_as_stored_and_failures_are_distinguished() {
    on_each(|at| {
        let tier = tier(30);
        let server = server(at, &tier);
        let client = client();
        let peer = up(&client, &server.addresses()[0]);
        let region = Region::new(32 * BLOCK);
        for turn in 0..20 {
            region.write(0, &vec![0; 32 * BLOCK]).unwrap();
            let mut wanted: Vec<_> = (0..30).map(|n| ((n * 7 + turn) % 30, BLOCK)).collect();
            wanted.push((99, BLOCK));
            wanted.push((3, BLOCK - 8));
            let mut done = fetch(&client, peer, &region, &wanted, LONG);
            done.failed.sort_unstable_by_key(|failed| failed.0);
            assert_eq!(
                done.failed,
                [(30, FetchError::Absent), (31, FetchError::Length)]
            );
            assert_eq!((done.blocks, done.bytes), (32, 30 * BLOCK as u64));
            let mut out = vec![0; BLOCK];
            for (place, (n, _)) in wanted[..30].iter().enumerate() {
                region.read(place * BLOCK, &mut out).unwrap();
                assert!(out == block(*n), "block {n}");
            }
        }
        let stats = client.stats();
        assert_eq!(stats.fetched_blocks_total, 600);
        assert_eq!(stats.failed_total[FetchError::Absent as usize], 20);
        assert_eq!(server.stats().served_bytes_total, 600 * BLOCK as u64);
        let empty = fetch(&client, peer, &region, &[], LONG);
        assert_eq!((empty.blocks, empty.failed.len()), (0, 0));
    });
}

#[test]
fn blocks_on_disk_are_served_through_memory() {
    on_each(|at| {
        let folder = tempfile::tempdir().unwrap();
        let options = crate::DiskOptions::new(folder.path(), 1 << 30);
        let disk = crate::DiskTier::open(clock::now(), clock::unix_ns(), options).unwrap();
        for n in 0..20 {
            disk.put(clock::now(), &key(n), &block(n)).unwrap();
        }
        // Memory has room for five blocks, one of which is not on disk.
        let memory = tier(2);
        memory.clear();
        memory.put(clock::now(), &key(77), &block(77)).unwrap();
        let server = start(EndpointOptions {
            listen: vec![at],
            serves: Some(Arc::clone(&memory)),
            lower: vec![disk.clone()],
            ..EndpointOptions::new("server", profile())
        });
        let client = client();
        let peer = up(&client, &server.addresses()[0]);
        let region = Region::new(3 * BLOCK);
        let wanted = [(77, BLOCK), (0, BLOCK), (99, BLOCK)];
        let first = fetch(&client, peer, &region, &wanted, LONG);
        assert_eq!(first.failed, [(2, FetchError::Absent)]);
        let mut out = vec![0; BLOCK];
        for n in 0..20 {
            let done = fetch(&client, peer, &region, &[(n, BLOCK)], LONG);
            assert!(done.failed.is_empty(), "{n}: {done:?}");
            region.read(0, &mut out).unwrap();
            assert!(out == block(n), "block {n}");
        }
        let short = fetch(&client, peer, &region, &[(3, BLOCK - 8)], LONG);
        assert_eq!(short.failed.len(), 1);
        assert!(memory.stats().blocks <= 5);
        // A damaged file makes its block absent, and has no other effect.
        for entry in std::fs::read_dir(folder.path().join("blocks")).unwrap() {
            let path = entry.unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
                std::fs::write(&path, bytes).unwrap();
            }
        }
        let done = fetch(&client, peer, &region, &[(4, BLOCK)], LONG);
        assert_eq!(done.failed, [(0, FetchError::Absent)]);
        assert_eq!(disk.stats().corrupt_total, 1);
    });
}

#[test]
fn a_damaged_block_is_reported_as_failed() {
    on_each(|at| {
        let tier = tier(3);
        tier.damage(&key(1));
        let server = server(at, &tier);
        let client = client();
        let peer = up(&client, &server.addresses()[0]);
        let region = Region::new(3 * BLOCK);
        let wanted = [(0, BLOCK), (1, BLOCK), (2, BLOCK)];
        let done = fetch(&client, peer, &region, &wanted, LONG);
        assert_eq!(done.failed, [(1, FetchError::Checksum)]);
        assert_eq!(done.bytes, 2 * BLOCK as u64);
        assert_eq!(
            client.stats().failed_total[FetchError::Checksum as usize],
            1
        );
    });
}

#[test]
fn engines_with_incompatible_blocks_refuse_each_other() {
    on_each(|at| {
        let tier = tier(1);
        let server = server(at, &tier);
        let other = Profile {
            block_size: 32,
            ..profile()
        };
        let client = start(EndpointOptions::new("client", other));
        client.connect(&server.addresses()[0]).unwrap();
        for endpoint in [&client, &server] {
            let (why, refused) = down(endpoint);
            assert!(refused, "{why}");
            for part in ["block_size", "`16` on server", "`32` on client"] {
                assert!(why.contains(part), "{why}");
            }
            assert_eq!(endpoint.stats().refused_total, 1);
        }
    });
}

#[test]
fn a_lost_peer_ends_its_transfers_and_is_reported() {
    on_each(|at| {
        let tier = tier(30);
        let server = server(at, &tier);
        let client = client();
        let peer = up(&client, &server.addresses()[0]);
        let address = server.addresses()[0].clone();
        drop(server);
        let (why, refused) = down(&client);
        assert!(why.contains("connection") && !refused, "{why}");
        let region = Region::new(BLOCK);
        let done = fetch(&client, peer, &region, &[(1, BLOCK)], LONG);
        assert_eq!(done.failed, [(0, FetchError::Lost)]);
        client.connect(&address).unwrap();
        let (why, _) = down(&client);
        assert!(
            why.contains("connecting failed") || why.contains("ended"),
            "{why}"
        );
    });
}

#[test]
fn peers_can_reconnect_repeatedly() {
    on_each(|at| {
        let tier = tier(2);
        let server = server(at, &tier);
        let client = client();
        let region = Region::new(BLOCK);
        for _ in 0..10 {
            let peer = up(&client, &server.addresses()[0]);
            assert!(
                fetch(&client, peer, &region, &[(1, BLOCK)], LONG)
                    .failed
                    .is_empty()
            );
            client.disconnect(peer);
            down(&client);
            let done = fetch(&client, peer, &region, &[(1, BLOCK)], LONG);
            assert_eq!(
                done.failed,
                [(0, FetchError::Lost)],
                "of an earlier connection"
            );
        }
    });
}

#[test]
fn submissions_over_a_limit_are_refused_without_effect() {
    let tier = tier(2);
    let server = server(any_tcp(), &tier);
    let client = BlockEndpoint::start(EndpointOptions {
        transfers_max: 2,
        peers_max: 1,
        ..EndpointOptions::new("client", profile())
    })
    .unwrap();
    let peer = up(&client, &server.addresses()[0]);
    assert_eq!(
        client.connect(&server.addresses()[0]),
        Err(SubmitError::Peers { max: 1 })
    );
    let region = Region::new(3 * BLOCK);
    let submit = |at: usize, len: usize| {
        let (a, b) = (key(0), key(1));
        let blocks = [
            Fetch {
                key: &a,
                at: 2 * BLOCK,
                len: BLOCK,
            },
            Fetch { key: &b, at, len },
        ];
        client.fetch(peer, &region, &blocks, LONG)
    };
    // The second block cannot be leased, so the first one is free again.
    assert!(matches!(
        submit(2 * BLOCK + 1, 9),
        Err(SubmitError::Region(_))
    ));
    assert!(matches!(submit(3 * BLOCK, 1), Err(SubmitError::Region(_))));
    let first = submit(0, BLOCK).unwrap();
    let done_first = done(&client, first);
    assert!(done_first.failed.is_empty());
    // Completions that are not polled count against the limit.
    let one = client.fetch(peer, &region, &[], LONG).unwrap();
    client.fetch(peer, &region, &[], LONG).unwrap();
    assert_eq!(submit(0, BLOCK), Err(SubmitError::Full { max: 2 }));
    done(&client, one);
    submit(0, BLOCK).unwrap();
    let long = vec![0; 70_000];
    let fetch = [Fetch {
        key: &long,
        at: 0,
        len: 1,
    }];
    let error = client.fetch(peer, &region, &fetch, LONG).unwrap_err();
    assert!(matches!(error, SubmitError::TooLarge { .. }), "{error}");
}

#[test]
fn keys_are_published_to_peers_and_gaps_are_repaired() {
    on_each(|at| {
        let tier = tier(1);
        let server = server(at, &tier);
        let index = Arc::new(PeerIndex::new(64, 10_000, u64::MAX));
        let client = BlockEndpoint::start(EndpointOptions {
            index: Some(Arc::clone(&index)),
            nixl: Nixl::Keys,
            ..EndpointOptions::new("client", profile())
        })
        .unwrap();
        let mut set = KeySet::new(0, 1);
        set.set_consumed(true);
        for n in 0..500 {
            set.change(&key(n), Change::Add(0)).unwrap();
        }
        let peer = up(&client, &server.addresses()[0]);
        let prompt: Vec<_> = (0..600).map(|n| digest(&key(n))).collect();
        let held = || {
            let mut out = vec![0; 64];
            index.overlap(&prompt, &mut out);
            out[peer.slot as usize]
        };
        // The work of a scheduler per step.
        let step_until = |set: &mut KeySet, want: u32| {
            let until = Instant::now() + LONG;
            while held() != want {
                assert!(Instant::now() < until, "{} of {want}", held());
                if server.take_snapshot_wanted() {
                    set.request_snapshot();
                }
                match set.message(64) {
                    Some(message) => assert!(server.publish(message)),
                    None => std::thread::yield_now(),
                }
            }
        };
        step_until(&mut set, 500);
        for n in 500..550 {
            set.change(&key(n), Change::Add(0)).unwrap();
        }
        step_until(&mut set, 550);
        // A message is lost; the next one reveals the gap.
        set.change(&key(0), Change::Remove(0)).unwrap();
        set.message(64).unwrap();
        set.change(&key(0), Change::Add(0)).unwrap();
        set.change(&key(550), Change::Add(0)).unwrap();
        step_until(&mut set, 551);
        assert!(client.stats().key_errors_total > 0);
        // An old snapshot arrives late.
        let stale = {
            let mut old = KeySet::new(0, 1);
            old.set_consumed(true);
            old.message(8).unwrap()
        };
        server.publish(stale);
        set.change(&key(551), Change::Add(0)).unwrap();
        step_until(&mut set, 552);
        assert_eq!(client.stats().key_stale_total, 1);
        drop(server);
        down(&client);
        assert_eq!(held(), 0, "a lost peer holds nothing");
    });
}

/// Accepts one connection and greets as an endpoint would; reads the other side's greeting.
fn fake(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let options = EndpointOptions::new("fake", profile());
    stream
        .write_all(&hello(&options, Scheme::Stream).frame())
        .unwrap();
    assert_eq!(next_frame(&mut stream).0, FrameKind::Hello);
    stream
}

fn next_frame(stream: &mut TcpStream) -> (FrameKind, Vec<u8>) {
    let mut bytes = vec![0; HEADER_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let len = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
    bytes.resize(HEADER_BYTES + len, 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..]).unwrap();
    let (kind, body, _) = read_frame(&bytes).unwrap().unwrap();
    (kind, body.to_vec())
}

/// The next request; skips pings.
fn next_get(stream: &mut TcpStream) -> Get {
    loop {
        let (kind, body) = next_frame(stream);
        if kind == FrameKind::Get {
            return Get::read(&body).unwrap();
        }
    }
}

fn fake_listener() -> (TcpListener, Address) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    (listener, address)
}

fn here(bytes: &[u8]) -> Answer {
    Answer::Here {
        checksum: crate::checksum(bytes),
        offset: 0,
        len: bytes.len() as u32,
    }
}

#[test]
fn a_stalled_transfer_fails_at_its_deadline_and_late_bytes_are_discarded() {
    let (listener, address) = fake_listener();
    let client = client();
    let region = Region::new(2 * BLOCK);
    let (resume, resumed) = std::sync::mpsc::channel();
    let peer_thread = std::thread::spawn(move || {
        let mut stream = fake(&listener);
        let get = next_get(&mut stream);
        let answers = vec![here(&block(0)), here(&block(1))];
        let request = get.request;
        stream
            .write_all(&Blocks { request, answers }.frame())
            .unwrap();
        stream.write_all(&block(0)).unwrap();
        stream.write_all(&block(1)[..BLOCK / 2]).unwrap();
        resumed.recv().unwrap(); // the deadline has passed
        stream.write_all(&block(1)[BLOCK / 2..]).unwrap();
        // The connection is still usable.
        let get = next_get(&mut stream);
        let answers = vec![here(&block(7))];
        let request = get.request;
        stream
            .write_all(&Blocks { request, answers }.frame())
            .unwrap();
        stream.write_all(&block(7)).unwrap();
        stream
    });
    let peer = up(&client, &address);
    let wanted = [(0, BLOCK), (1, BLOCK)];
    let first = fetch(&client, peer, &region, &wanted, Duration::from_millis(300));
    assert_eq!(first.failed, [(1, FetchError::Deadline)]);
    assert_eq!(
        first.bytes, BLOCK as u64,
        "the first block arrived and was verified"
    );
    assert!(first.took_ns >= 300_000_000);
    region.write(BLOCK, &vec![0xee; BLOCK]).unwrap(); // the caller owns it again
    resume.send(()).unwrap();
    let next = fetch(&client, peer, &region, &[(7, BLOCK)], LONG);
    assert!(next.failed.is_empty());
    let mut out = vec![0; BLOCK];
    region.read(BLOCK, &mut out).unwrap();
    assert!(
        out.iter().all(|&byte| byte == 0xee),
        "late bytes are discarded"
    );
    region.read(0, &mut out).unwrap();
    assert_eq!(out, block(7));
    peer_thread.join().unwrap();
}

#[test]
fn a_silent_peer_costs_a_deadline_and_then_its_connection() {
    let (listener, address) = fake_listener();
    let client = BlockEndpoint::start(EndpointOptions {
        silence_max: Duration::from_millis(400),
        ..EndpointOptions::new("client", profile())
    })
    .unwrap();
    let peer_thread = std::thread::spawn(move || fake(&listener));
    let peer = up(&client, &address);
    let region = Region::new(BLOCK);
    let wanted = [(0, BLOCK)];
    let done = fetch(&client, peer, &region, &wanted, Duration::from_millis(50));
    assert_eq!(done.failed, [(0, FetchError::Deadline)]);
    let (why, _) = down(&client);
    assert!(why.contains("silent for 400 ms"), "{why}");
    drop(peer_thread.join().unwrap());
}

/// Connects to `server` and sends `bytes`; returns why the server ended the connection.
fn say(server: &BlockEndpoint, greet: bool, bytes: &[u8]) -> String {
    let Address::Tcp(at) = server.addresses()[0] else {
        panic!("dialed by TCP")
    };
    let mut stream = TcpStream::connect(at).unwrap();
    if greet {
        let options = EndpointOptions::new("fake", profile());
        stream
            .write_all(&hello(&options, Scheme::Stream).frame())
            .unwrap();
    }
    let _ = stream.write_all(bytes);
    let why = down(server).0;
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest); // closed, with or without an error
    why
}

#[test]
fn a_peer_pins_at_most_half_of_all_slots_and_for_a_limited_time() {
    on_each(|at| {
        let memory = MemoryTier::new(MemoryOptions {
            bytes: 8 * BLOCK,
            block_bytes: BLOCK,
            ttl_ns: None,
        })
        .unwrap();
        for n in 0..8 {
            memory.put(clock::now(), &key(n), &block(n)).unwrap();
        }
        let server = start(EndpointOptions {
            listen: vec![at.clone()],
            serves: Some(Arc::clone(&memory)),
            silence_max: Duration::from_millis(400),
            serve_max: Duration::ZERO,
            ..EndpointOptions::new("server", profile())
        });
        // The peer requests every block, for 49 days, and reads nothing; but it sends pings.
        let mut peer = RawPeer::dial(&server.addresses()[0]);
        let get = Get {
            request: 1,
            deadline_ms: u32::MAX,
            blocks: (0..8)
                .map(|n| Wanted {
                    key: key(n).into(),
                    len: BLOCK as u32,
                })
                .collect(),
        };
        peer.send(&peer.greeting(&at, &profile()));
        peer.send(&get.frame());
        wait(&server, |event| {
            matches!(event, TransportEvent::Up { .. }).then_some(())
        });
        let until = Instant::now() + LONG;
        // It must not count as silent, however slow this thread is.
        let mut pinged = Instant::now();
        let mut ping = || {
            if pinged.elapsed() < Duration::from_millis(50) {
                return Ok(0);
            }
            pinged = Instant::now();
            peer.try_send(&frame(FrameKind::Ping, &[]))
        };
        while server.stats().served_blocks_total < 4 {
            assert!(Instant::now() < until, "the request is served in time");
            ping().unwrap();
            std::thread::yield_now();
        }
        for n in 100..120 {
            ping().unwrap();
            memory.put(clock::now(), &key(n), &block(n)).unwrap();
        }
        let stats = server.stats();
        assert_eq!((stats.served_blocks_total, stats.absent_total), (4, 4));
        if matches!(at, Address::Tcp(_)) {
            return; // the socket's buffer holds the blocks
        }
        loop {
            if ping().is_err() {
                break;
            }
            assert!(Instant::now() < until, "the peer is disconnected in time");
            std::thread::yield_now();
        }
        let (why, _) = down(&server);
        assert!(why.contains("did not read its answers in time"), "{why}");
    });
}

#[test]
fn memory_is_passed_only_to_compatible_peers() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("kv"));
    let tier = tier(1);
    let server = server(at.clone(), &tier);
    let mut mute = RawPeer::dial(&at);
    assert!(mute.receive().is_none(), "the greeting has no descriptor");
    let mut other = RawPeer::dial(&at);
    let model = Profile {
        model: "another".into(),
        ..profile()
    };
    other.send(&other.greeting(&at, &model));
    down(&server);
    while !other.is_ended {
        assert!(other.receive().is_none(), "a refusal has no descriptor");
    }
    let mut same = RawPeer::dial(&at);
    same.send(&same.greeting(&at, &profile()));
    let fd = loop {
        assert!(!same.is_ended, "it receives the memory");
        if let Some(fd) = same.receive() {
            break fd;
        }
    };
    assert_eq!(
        rustix::io::pwrite(&fd, b"poison", 0),
        Err(rustix::io::Errno::PERM)
    );
}

#[test]
fn peers_that_never_greet_do_not_block_others() {
    on_each(|at| {
        let tier = tier(1);
        let server = start(EndpointOptions {
            listen: vec![at],
            serves: Some(Arc::clone(&tier)),
            peers_max: 4,
            silence_max: LONG,
            ..EndpointOptions::new("server", profile())
        });
        let mute: Vec<RawPeer> = (0..12)
            .map(|_| RawPeer::dial(&server.addresses()[0]))
            .collect();
        let client = client();
        let peer = up(&client, &server.addresses()[0]);
        let region = Region::new(BLOCK);
        let done = fetch(&client, peer, &region, &[(0, BLOCK)], LONG);
        assert_eq!(done.failed, []);
        drop(mute);
    });
}

#[test]
fn an_endless_greeting_is_refused() {
    let tier = tier(1);
    let server = server(any_tcp(), &tier);
    let mut bytes = frame(FrameKind::Hello, &vec![0; 4 << 20]);
    bytes.pop();
    let why = say(&server, false, &bytes);
    assert!(why.contains("maximum length of a greeting"), "{why}");
}

/// A peer that sends the bytes a test gives it.
struct RawPeer {
    socket: std::os::fd::OwnedFd,
    is_ended: bool,
}

impl RawPeer {
    fn dial(at: &Address) -> RawPeer {
        let socket = match at {
            Address::Tcp(at) | Address::Nixl(at) => TcpStream::connect(at).unwrap().into(),
            Address::Unix(path) => std::os::unix::net::UnixStream::connect(path)
                .unwrap()
                .into(),
        };
        RawPeer {
            socket,
            is_ended: false,
        }
    }

    /// The frames that bring the connection up, without memory of its own.
    #[allow(clippy::unused_self)]
    fn greeting(&self, at: &Address, profile: &Profile) -> Vec<u8> {
        let options = EndpointOptions::new("raw", profile.clone());
        let scheme = Scheme::of(at);
        let mut bytes = hello(&options, scheme).frame();
        if scheme == Scheme::Pull {
            bytes.extend(crate::wire::Introduction::default().frame());
        }
        bytes
    }

    fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).unwrap();
    }

    fn try_send(&mut self, bytes: &[u8]) -> rustix::io::Result<usize> {
        rustix::net::send(&self.socket, bytes, rustix::net::SendFlags::NOSIGNAL)
    }

    /// Reads some bytes; returns a descriptor received with them.
    fn receive(&mut self) -> Option<std::os::fd::OwnedFd> {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 4_096];
        let mut slices = [std::io::IoSliceMut::new(&mut bytes)];
        let read = recvmsg(
            &self.socket,
            &mut slices,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        self.is_ended = read.is_err() || read.is_ok_and(|read| read.bytes == 0);
        control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
    }
}

#[test]
fn malformed_input_ends_only_its_own_connection() {
    let tier = tier(3);
    let server = server(any_tcp(), &tier);
    let client = client();
    let peer = up(&client, &server.addresses()[0]);
    let mut version = frame(FrameKind::Ping, &[]);
    version[4] = 9;
    let why = say(&server, false, &version);
    assert!(
        why.contains("version 9") && why.contains("one release"),
        "{why}"
    );
    let why = say(&server, false, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(why.contains("version"), "{why}");
    let get = Get {
        request: 1,
        deadline_ms: 1,
        blocks: Vec::new(),
    };
    assert!(say(&server, false, &get.frame()).contains("a greeting is missing"));
    let mut damaged = get.frame();
    damaged[HEADER_BYTES] ^= 1;
    assert!(say(&server, true, &damaged).contains("checksum is wrong"));
    let mut kind = get.frame();
    kind[5] = 77;
    assert!(say(&server, true, &kind).contains("kind is unknown"));
    let mut long = get.frame();
    long[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(say(&server, true, &long).contains("exceeds the maximum length"));
    let short = frame(FrameKind::Get, &[0; 15]);
    assert!(say(&server, true, &short).contains("shorter than its fields"));
    let answers = Blocks {
        request: 1,
        answers: vec![Answer::Absent],
    };
    // Unexpected answers are harmless; a truncated frame is not handled.
    let mut cut = answers.frame();
    cut.extend(&get.frame()[..20]);
    let Address::Tcp(at) = server.addresses()[0] else {
        panic!("dialed by TCP")
    };
    let mut stream = TcpStream::connect(at).unwrap();
    let options = EndpointOptions::new("fake", profile());
    stream
        .write_all(&hello(&options, Scheme::Stream).frame())
        .unwrap();
    stream.write_all(&cut).unwrap();
    drop(stream);
    down(&server);
    assert!(server.stats().malformed_total >= 7);
    // The other connection is unaffected.
    let region = Region::new(BLOCK);
    assert!(
        fetch(&client, peer, &region, &[(2, BLOCK)], LONG)
            .failed
            .is_empty()
    );
}

#[test]
fn a_peer_with_mismatched_answers_is_disconnected() {
    for wrong in [
        vec![here(&block(0)), here(&block(1))],
        vec![here(&block(0)[..BLOCK - 8])],
    ] {
        let (listener, address) = fake_listener();
        let client = client();
        let peer_thread = std::thread::spawn(move || {
            let mut stream = fake(&listener);
            let request = next_get(&mut stream).request;
            let answers = wrong;
            stream
                .write_all(&Blocks { request, answers }.frame())
                .unwrap();
            stream
        });
        let peer = up(&client, &address);
        let region = Region::new(BLOCK);
        let done = fetch(&client, peer, &region, &[(0, BLOCK)], LONG);
        assert_eq!(done.failed, [(0, FetchError::Lost)]);
        down(&client);
        peer_thread.join().unwrap();
    }
}

#[test]
fn blocks_stay_until_a_peer_has_read_them() {
    // A tier of one block that is replaced continuously, while a peer fetches it.
    let folder = tempfile::tempdir().unwrap();
    let tier = MemoryTier::new(MemoryOptions {
        bytes: 2 * BLOCK,
        block_bytes: BLOCK,
        ttl_ns: None,
    })
    .unwrap();
    let server = server(Address::Unix(folder.path().join("kv")), &tier);
    let client = client();
    let peer = up(&client, &server.addresses()[0]);
    let region = Region::new(4 * BLOCK);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (mut found, mut out) = (0, vec![0; BLOCK]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let blocks: Vec<_> = (0..4).map(block).collect();
            let mut n = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                n = (n + 1) % 4;
                let _ = tier.put(SimTime(1), &key(n), &blocks[n as usize]);
            }
        });
        for _ in 0..300 {
            let wanted = [(0, BLOCK), (1, BLOCK), (2, BLOCK), (3, BLOCK)];
            let done = fetch(&client, peer, &region, &wanted, LONG);
            for n in 0..4 {
                if let Some((_, why)) = done.failed.iter().find(|failed| failed.0 == n) {
                    assert_eq!(*why, FetchError::Absent);
                } else {
                    region.read(n as usize * BLOCK, &mut out).unwrap();
                    assert!(out == block(n.into()), "block {n}");
                    found += 1;
                }
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(found > 0);
    assert_eq!(
        client.stats().failed_total[FetchError::Checksum as usize],
        0
    );
}

#[test]
fn a_reader_that_never_releases_is_disconnected_and_its_blocks_are_freed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let tier = tier_of(1, 2); // with room for one more
    let server = BlockEndpoint::start(EndpointOptions {
        listen: vec![Address::Unix(path.clone())],
        serves: Some(Arc::clone(&tier)),
        silence_max: Duration::from_millis(200),
        ..EndpointOptions::new("server", profile())
    })
    .unwrap();
    let mut reader = std::os::unix::net::UnixStream::connect(path).unwrap();
    let options = EndpointOptions::new("fake", profile());
    reader
        .write_all(&hello(&options, Scheme::Map).frame())
        .unwrap();
    let blocks = vec![Wanted {
        key: key(0).into(),
        len: BLOCK as u32,
    }];
    let get = Get {
        request: 1,
        deadline_ms: 1,
        blocks,
    };
    reader.write_all(&get.frame()).unwrap();
    // It sends pings, so it is not silent; but it keeps the block pinned.
    let mut pinger = reader.try_clone().unwrap();
    let pings = std::thread::spawn(move || {
        while pinger.write_all(&frame(FrameKind::Ping, &[])).is_ok() {
            std::thread::yield_now();
        }
    });
    wait(&server, |event| {
        matches!(event, TransportEvent::Up { .. }).then_some(())
    });
    while server.stats().served_blocks_total == 0 {
        std::thread::yield_now();
    }
    let now = clock::now();
    tier.put(now, &key(1), &block(1)).unwrap();
    tier.put(now, &key(2), &block(2)).unwrap(); // evicts 1, as 0 is being read
    assert!(tier.remove(&key(0)));
    assert!(tier.len_of(now, &key(1)).is_none());
    let (why, _) = down(&server);
    assert!(why.contains("did not read its answers"), "{why}");
    pings.join().unwrap();
    tier.put(now, &key(3), &block(3)).unwrap();
    assert!(
        tier.len_of(now, &key(2)).is_some(),
        "the slot of 0 is free again"
    );
}

#[test]
fn addresses_are_parsed_and_invalid_ones_refused() {
    for text in [
        "tcp://127.0.0.1:80",
        "unix:///tmp/x",
        "tcp://[::1]:1",
        "nixl://10.0.0.1:7300",
    ] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "tcp://",
        "tcp://host",
        "unix://",
        "127.0.0.1:80",
        "udp://1.1.1.1:1",
    ] {
        let error = text.parse::<Address>().unwrap_err().to_string();
        assert!(error.contains("write tcp://IP:PORT"), "{error}");
    }
}

#[test]
fn a_socket_file_of_a_dead_process_is_replaced_and_one_in_use_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let tier = tier(1);
    let first = server(Address::Unix(path.clone()), &tier);
    let error = BlockEndpoint::start(EndpointOptions {
        listen: vec![Address::Unix(path.clone())],
        ..EndpointOptions::new("second", profile())
    });
    assert!(matches!(error, Err(TransportError::Listen { .. })));
    drop(first);
    assert!(!path.exists());
}

/// Polls until `f` holds.
fn until(endpoint: &BlockEndpoint, f: impl Fn() -> bool) {
    let late = Instant::now() + LONG;
    let mut events = Vec::new();
    while !f() {
        assert!(Instant::now() < late, "the condition did not hold in time");
        endpoint.poll(1, &mut events);
        std::thread::yield_now();
    }
}

#[test]
fn a_block_longer_than_a_read_arrives_complete() {
    const LONG_BLOCK: usize = (5 << 20) / 2 + 3;
    let memory = MemoryTier::new(MemoryOptions {
        bytes: 12 * LONG_BLOCK,
        block_bytes: LONG_BLOCK,
        ttl_ns: None,
    })
    .unwrap();
    let bytes = |n: u64| -> Vec<u8> {
        let words = (0..=LONG_BLOCK as u64 / 8).flat_map(|word| draw(n, word).to_le_bytes());
        words.take(LONG_BLOCK).collect()
    };
    for n in 0..6 {
        memory.put(clock::now(), &key(n), &bytes(n)).unwrap();
    }
    let server = server(any_nixl(), &memory);
    let client = client();
    let peer = up(&client, &server.addresses()[0]);
    let region = Region::new(6 * LONG_BLOCK);
    let keys: Vec<_> = (0..6).map(key).collect();
    let blocks = keys.iter().enumerate().map(|(at, key)| Fetch {
        key,
        at: at * LONG_BLOCK,
        len: LONG_BLOCK,
    });
    let blocks: Vec<_> = blocks.collect();
    let id = client.fetch(peer, &region, &blocks, LONG).unwrap();
    let done = done(&client, id);
    assert_eq!((done.failed.len(), done.bytes), (0, 6 * LONG_BLOCK as u64));
    let mut out = vec![0; LONG_BLOCK];
    for n in 0..6 {
        region.read(n * LONG_BLOCK, &mut out).unwrap();
        assert!(out == bytes(n as u64), "block {n}");
    }
}

#[test]
fn a_read_that_ends_after_its_deadline_writes_nothing_and_frees_its_blocks() {
    let tier = tier(3);
    let server = fake_nixl_server(&tier);
    let switch = Arc::new(Switch::default());
    let client = start_with_fake(EndpointOptions::new("client", profile()), &switch);
    let peer = up(&client, &server.addresses()[0]);
    let region = Region::new(3 * BLOCK);
    let mark = vec![0xab; 3 * BLOCK];
    region.write(0, &mark).unwrap();
    switch.held.store(true, Ordering::SeqCst);
    let wanted = [(0, BLOCK), (1, BLOCK), (2, BLOCK)];
    let late = fetch(&client, peer, &region, &wanted, Duration::from_millis(30));
    assert!(
        late.failed
            .iter()
            .all(|(_, why)| *why == FetchError::Deadline)
    );
    assert_eq!((late.failed.len(), late.bytes), (3, 0));
    until(&client, || switch.posted.load(Ordering::SeqCst) == 1);
    // The caller owns the destinations again, while the read is still in flight.
    region.write(0, &mark).unwrap();
    // No further read can start, as this peer's slot is taken.
    let next = fetch(&client, peer, &region, &wanted, Duration::from_millis(30));
    assert_eq!(next.failed.len(), 3);
    assert_eq!(switch.posted.load(Ordering::SeqCst), 1);
    switch.held.store(false, Ordering::SeqCst);
    until(&client, || switch.ended.load(Ordering::SeqCst) == 1);
    let mut out = vec![0; 3 * BLOCK];
    region.read(0, &mut out).unwrap();
    assert!(out == mark, "late bytes were written");
    let done = fetch(&client, peer, &region, &wanted, LONG);
    assert!(done.failed.is_empty(), "{done:?}");
    region.read(BLOCK, &mut out[..BLOCK]).unwrap();
    assert!(out[..BLOCK] == block(1));
    // Nothing is pinned any more: every slot can be reused.
    until(&client, || {
        (10..14).all(|n| tier.put(clock::now(), &key(n), &block(n)).is_ok())
    });
}

#[test]
fn a_failed_read_ends_the_connection_and_the_next_one_works() {
    let tier = tier(2);
    let server = fake_nixl_server(&tier);
    let switch = Arc::new(Switch::default());
    let client = start_with_fake(EndpointOptions::new("client", profile()), &switch);
    let region = Region::new(2 * BLOCK);
    let wanted = [(0, BLOCK), (1, BLOCK)];
    // More rounds than slots: a failure must not leak one.
    for _ in 0..6 {
        switch.failing.store(true, Ordering::SeqCst);
        let peer = up(&client, &server.addresses()[0]);
        let done = fetch(&client, peer, &region, &wanted, LONG);
        assert!(done.failed.iter().all(|(_, why)| *why == FetchError::Lost));
        assert_eq!(done.failed.len(), 2);
        let (why, refused) = down(&client);
        assert!(why.contains("NIXL failed") && !refused, "{why}");
    }
    switch.failing.store(false, Ordering::SeqCst);
    let peer = up(&client, &server.addresses()[0]);
    let done = fetch(&client, peer, &region, &wanted, LONG);
    assert!(done.failed.is_empty(), "{done:?}");
}

#[test]
fn a_peer_lost_during_a_read_costs_only_its_blocks() {
    let tier = tier(2);
    let gone = fake_nixl_server(&tier);
    let other = fake_nixl_server(&tier);
    let switch = Arc::new(Switch::default());
    let client = start_with_fake(EndpointOptions::new("client", profile()), &switch);
    let region = Region::new(2 * BLOCK);
    let peer = up(&client, &gone.addresses()[0]);
    switch.held.store(true, Ordering::SeqCst);
    let key = key(0);
    let blocks = [Fetch {
        key: &key,
        at: 0,
        len: BLOCK,
    }];
    let id = client.fetch(peer, &region, &blocks, LONG).unwrap();
    until(&client, || switch.posted.load(Ordering::SeqCst) == 1);
    drop(gone);
    // The ends of the connection and of the transfer may be reported in either order.
    let (mut failed, mut is_down) = (None, false);
    while failed.is_none() || !is_down {
        wait(&client, |event| {
            match event {
                TransportEvent::Done(done) if done.transfer == id => {
                    failed = Some(done.failed.clone());
                }
                TransportEvent::Down { .. } => is_down = true,
                _ => {}
            }
            Some(())
        });
    }
    assert_eq!(failed.unwrap(), [(0, FetchError::Lost)]);
    // The read is still in flight, and its slot is not reused.
    switch.held.store(false, Ordering::SeqCst);
    until(&client, || switch.ended.load(Ordering::SeqCst) == 1);
    let peer = up(&client, &other.addresses()[0]);
    let done = fetch(&client, peer, &region, &[(1, BLOCK)], LONG);
    assert!(done.failed.is_empty(), "{done:?}");
}

#[test]
fn another_block_transport_is_refused_unless_the_peer_only_follows_keys() {
    let tier = tier(1);
    let server = server(any_nixl(), &tier);
    let Address::Nixl(at) = server.addresses()[0] else {
        panic!("it listens elsewhere")
    };
    let client = client();
    client.connect(&Address::Tcp(at)).unwrap();
    for endpoint in [&client, &server] {
        let (why, refused) = down(endpoint);
        assert!(refused, "{why}");
        for part in ["`transport`", "`nixl` on server", "`tcp` on client"] {
            assert!(why.contains(part), "{why}");
        }
    }
    let without = BlockEndpoint::start(EndpointOptions::new("without", profile())).unwrap();
    without.connect(&Address::Nixl(at)).unwrap();
    let (why, refused) = down(&without);
    assert!(refused && why.contains("pip install"), "{why}");
    let keys_only = BlockEndpoint::start(EndpointOptions {
        nixl: Nixl::Keys,
        ..EndpointOptions::new("keys", profile())
    });
    let keys_only = keys_only.unwrap();
    let peer = up(&keys_only, &server.addresses()[0]);
    let done = fetch(&keys_only, peer, &Region::new(BLOCK), &[(0, BLOCK)], LONG);
    assert_eq!(done.failed, [(0, FetchError::Lost)]);
    let listens = BlockEndpoint::start(EndpointOptions {
        listen: vec![any_nixl()],
        ..EndpointOptions::new("without", profile())
    });
    let error = listens.err().unwrap().to_string();
    assert!(error.contains("pip install 'slipstream[nixl]'"), "{error}");
    let missing = BlockEndpoint::start(EndpointOptions {
        nixl: Nixl::On(NixlOptions::new("/nowhere/libnixl_capi.so".as_ref())),
        ..EndpointOptions::new("missing", profile())
    });
    let error = missing.err().unwrap().to_string();
    for part in ["/nowhere/libnixl_capi.so", "pip install 'slipstream[nixl]'"] {
        assert!(error.contains(part), "{error}");
    }
}
