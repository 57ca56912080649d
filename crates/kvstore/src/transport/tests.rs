//! Endpoints against each other, and against peers that do what no endpoint does.

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
use crate::nixl::{NixlError, NixlOptions, OneSided, Reading, Span, Ticket};
use crate::tier::Tier;
use crate::tier::memory::{MemoryOptions, MemoryTier};
use crate::wire::{Answer, Blocks, Get, HEADER_BYTES, Kind, Wanted, frame, read_frame};

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

/// A tier that holds blocks `0..blocks`, and may lend all of them.
fn tier(blocks: u64) -> Arc<MemoryTier> {
    tier_of(blocks, 2 * blocks as usize + 1)
}

/// A tier of some places that holds blocks `0..blocks`.
fn tier_of(blocks: u64, places: usize) -> Arc<MemoryTier> {
    let tier = MemoryTier::new(MemoryOptions {
        bytes: places * BLOCK,
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

/// Starts an endpoint that reads by NIXL where `SLIPSTREAM_NIXL_LIBRARY` names its library, and else
/// by what stands in for it.
fn start(options: EndpointOptions) -> Endpoint {
    match std::env::var_os("SLIPSTREAM_NIXL_LIBRARY") {
        Some(library) => Endpoint::start(EndpointOptions {
            nixl: Nixl::On(NixlOptions {
                staging_bytes: 4 << 20,
                ..NixlOptions::new(library.as_ref())
            }),
            ..options
        })
        .unwrap(),
        None => start_reading(options, &Arc::default()),
    }
}

/// Starts an endpoint that reads by a [`Stand`]; four slots, of which each peer may have one.
fn start_reading(options: EndpointOptions, switch: &Arc<Switch>) -> Endpoint {
    let stand = Stand {
        switch: Arc::clone(switch),
        reads: Vec::new(),
    };
    let served = options.serves.as_ref().map(|tier| Arc::clone(tier.arena()));
    let pulls = Pulls::new(Box::new(stand), &Region::new(4 << 20), served).unwrap();
    let options = EndpointOptions {
        nixl: Nixl::Keys,
        ..options
    };
    Endpoint::start_with(options, Some(pulls)).unwrap()
}

/// A server that is read by a [`Stand`] alone.
fn stand_in_server(tier: &Arc<MemoryTier>) -> Endpoint {
    let options = EndpointOptions {
        listen: vec![any_nixl()],
        serves: Some(Arc::clone(tier)),
        ..EndpointOptions::new("server", profile())
    };
    start_reading(options, &Arc::default())
}

/// What reads do.
#[derive(Default)]
struct Switch {
    /// They stay under way.
    held: AtomicBool,
    /// They fail.
    failing: AtomicBool,
    posted: AtomicUsize,
    ended: AtomicUsize,
}

/// Stands in for NIXL between endpoints of one process, and does to reads what a test wants.
struct Stand {
    switch: Arc<Switch>,
    /// By their tickets; `None` once ended.
    reads: Vec<Option<Vec<Span>>>,
}

impl OneSided for Stand {
    fn introduction(&mut self) -> Result<Vec<u8>, NixlError> {
        Ok(format!("{:p}", Arc::as_ptr(&self.switch)).into())
    }

    fn meet(&mut self, introduction: &[u8]) -> Result<String, NixlError> {
        Ok(String::from_utf8(introduction.to_vec()).unwrap())
    }

    fn part(&mut self, _peer: &str) {}

    unsafe fn read(&mut self, _peer: &str, spans: &[Span]) -> Result<Ticket, NixlError> {
        self.switch.posted.fetch_add(1, Ordering::SeqCst);
        self.reads.push(Some(spans.to_vec()));
        Ok(Ticket(self.reads.len() - 1))
    }

    fn poll(&mut self, ticket: Ticket) -> Reading {
        if self.switch.held.load(Ordering::SeqCst) {
            return Reading::UnderWay;
        }
        let spans = self.reads[ticket.0].take().expect("tickets are void then");
        self.switch.ended.fetch_add(1, Ordering::SeqCst);
        if self.switch.failing.load(Ordering::SeqCst) {
            return Reading::Failed;
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
        Reading::Done
    }

    fn progress(&mut self) {}
}

/// Runs `check` with an address of each kind to listen at.
fn on_each(check: impl Fn(Address)) {
    check(any_tcp());
    check(any_nixl());
    let folder = tempfile::tempdir().unwrap();
    check(Address::Unix(folder.path().join("kv")));
}

fn server(at: Address, tier: &Arc<MemoryTier>) -> Endpoint {
    start(EndpointOptions {
        listen: vec![at],
        serves: Some(Arc::clone(tier)),
        ..EndpointOptions::new("server", profile())
    })
}

fn client() -> Endpoint {
    start(EndpointOptions::new("client", profile()))
}

/// Polls until there is an event that `f` takes; others are dropped.
fn wait<T>(endpoint: &Endpoint, mut f: impl FnMut(&Event) -> Option<T>) -> T {
    let until = Instant::now() + LONG;
    let mut events = Vec::new();
    loop {
        assert!(Instant::now() < until, "nothing came");
        events.clear();
        if endpoint.poll(1, &mut events) == 0 {
            std::thread::yield_now();
        }
        if let Some(found) = events.first().and_then(&mut f) {
            return found;
        }
    }
}

fn up(endpoint: &Endpoint, address: &Address) -> PeerId {
    let dialed = endpoint.connect(address).unwrap();
    wait(endpoint, |event| match event {
        Event::Up { peer, .. } => {
            assert_eq!(*peer, dialed);
            Some(dialed)
        }
        Event::Down { why, .. } => panic!("{why}"),
        Event::Done(_) => None,
    })
}

fn down(endpoint: &Endpoint) -> (String, bool) {
    wait(endpoint, |event| match event {
        Event::Down { why, refused, .. } => Some((why.clone(), *refused)),
        _ => None,
    })
}

fn done(endpoint: &Endpoint, id: TransferId) -> Completion {
    wait(endpoint, |event| match event {
        Event::Done(done) if done.transfer == id => Some(done.clone()),
        _ => None,
    })
}

/// Asks for `(block, length)` each, into places of `BLOCK` bytes.
fn fetch(
    endpoint: &Endpoint,
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
fn who_stops_serving_gives_nothing_that_is_stored_later() {
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
        assert_eq!(
            memory.len_of(clock::now(), &key(7)),
            None,
            "nor takes it from disk"
        );
    });
}

#[test]
fn blocks_come_as_they_were_stored_and_others_are_told_apart() {
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
fn blocks_on_disk_come_by_way_of_memory() {
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
        // A file that was damaged is absent, and nothing else.
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
fn a_damaged_block_is_a_failure_and_not_a_block() {
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
fn engines_whose_blocks_mean_something_else_refuse_each_other() {
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
fn a_lost_peer_ends_its_transfers_and_is_told() {
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
fn peers_come_and_go_and_come_again() {
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
fn too_much_at_once_is_refused_and_nothing_is_begun() {
    let tier = tier(2);
    let server = server(any_tcp(), &tier);
    let client = Endpoint::start(EndpointOptions {
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
    // The second block's place is not free or does not exist: the first one's is free again.
    assert!(matches!(
        submit(2 * BLOCK + 1, 9),
        Err(SubmitError::Region(_))
    ));
    assert!(matches!(submit(3 * BLOCK, 1), Err(SubmitError::Region(_))));
    let first = submit(0, BLOCK).unwrap();
    let done_first = done(&client, first);
    assert!(done_first.failed.is_empty());
    // Completions that nobody polls take room.
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
fn keys_travel_with_the_connection_and_gaps_are_mended() {
    on_each(|at| {
        let tier = tier(1);
        let server = server(at, &tier);
        let index = Arc::new(PeerIndex::new(64, 10_000, u64::MAX));
        let client = Endpoint::start(EndpointOptions {
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
        // What a scheduler does each step.
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
        // A message is lost on its way; the next one shows it.
        set.change(&key(0), Change::Remove(0)).unwrap();
        set.message(64).unwrap();
        set.change(&key(0), Change::Add(0)).unwrap();
        set.change(&key(550), Change::Add(0)).unwrap();
        step_until(&mut set, 551);
        assert!(client.stats().key_errors_total > 0);
        // An old snapshot comes late.
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
    assert_eq!(next_frame(&mut stream).0, Kind::Hello);
    stream
}

fn next_frame(stream: &mut TcpStream) -> (Kind, Vec<u8>) {
    let mut bytes = vec![0; HEADER_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let len = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
    bytes.resize(HEADER_BYTES + len, 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..]).unwrap();
    let (kind, body, _) = read_frame(&bytes).unwrap().unwrap();
    (kind, body.to_vec())
}

/// The next request, past pings.
fn next_get(stream: &mut TcpStream) -> Get {
    loop {
        let (kind, body) = next_frame(stream);
        if kind == Kind::Get {
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
fn a_peer_that_stops_mid_transfer_costs_its_deadline_and_no_later_bytes_are_written() {
    let (listener, address) = fake_listener();
    let client = client();
    let region = Region::new(2 * BLOCK);
    let (resume, told) = std::sync::mpsc::channel();
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
        told.recv().unwrap(); // the deadline has passed
        stream.write_all(&block(1)[BLOCK / 2..]).unwrap();
        // The connection is as good as before.
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
        "the first one is there and was verified"
    );
    assert!(first.took_ns >= 300_000_000);
    region.write(BLOCK, &vec![0xee; BLOCK]).unwrap(); // it is the caller's again
    resume.send(()).unwrap();
    let next = fetch(&client, peer, &region, &[(7, BLOCK)], LONG);
    assert!(next.failed.is_empty());
    let mut out = vec![0; BLOCK];
    region.read(BLOCK, &mut out).unwrap();
    assert!(
        out.iter().all(|&byte| byte == 0xee),
        "late bytes went nowhere"
    );
    region.read(0, &mut out).unwrap();
    assert_eq!(out, block(7));
    peer_thread.join().unwrap();
}

#[test]
fn a_peer_that_never_answers_costs_its_deadline_and_then_its_connection() {
    let (listener, address) = fake_listener();
    let client = Endpoint::start(EndpointOptions {
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

/// Dials `server` and says `bytes`; returns why the server ended it.
fn say(server: &Endpoint, greet: bool, bytes: &[u8]) -> String {
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
    let _ = stream.read_to_end(&mut rest); // it is closed, in order or not
    why
}

#[test]
fn a_peer_pins_half_of_all_places_at_most_and_not_for_as_long_as_it_likes() {
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
        // It asks for everything, for 49 days, and takes nothing; but it is not silent.
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
            matches!(event, Event::Up { .. }).then_some(())
        });
        let until = Instant::now() + LONG;
        while server.stats().served_blocks_total < 4 {
            assert!(Instant::now() < until, "it is served");
            std::thread::yield_now();
        }
        for n in 100..120 {
            memory.put(clock::now(), &key(n), &block(n)).unwrap();
        }
        let stats = server.stats();
        assert_eq!((stats.served_blocks_total, stats.absent_total), (4, 4));
        if matches!(at, Address::Tcp(_)) {
            return; // the socket has taken the blocks
        }
        loop {
            if peer.try_send(&frame(Kind::Ping, &[])).is_err() {
                break;
            }
            assert!(Instant::now() < until, "it is cut off");
            std::thread::yield_now();
        }
        let (why, _) = down(&server);
        assert!(
            why.contains("did not take what it asked for in time"),
            "{why}"
        );
    });
}

#[test]
fn memory_is_given_to_peers_whose_greeting_agrees_and_to_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("kv"));
    let tier = tier(1);
    let server = server(at.clone(), &tier);
    let mut mute = RawPeer::dial(&at);
    assert!(
        mute.receive().is_none(),
        "the greeting brings no descriptor"
    );
    let mut other = RawPeer::dial(&at);
    let model = Profile {
        model: "another".into(),
        ..profile()
    };
    other.send(&other.greeting(&at, &model));
    down(&server);
    while !other.is_ended {
        assert!(other.receive().is_none(), "a refusal brings no descriptor");
    }
    let mut same = RawPeer::dial(&at);
    same.send(&same.greeting(&at, &profile()));
    let fd = loop {
        assert!(!same.is_ended, "it is given the memory");
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
fn peers_that_never_greet_keep_no_other_out() {
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
fn a_greeting_that_does_not_end_is_cut_short() {
    let tier = tier(1);
    let server = server(any_tcp(), &tier);
    let mut bytes = frame(Kind::Hello, &vec![0; 4 << 20]);
    bytes.pop();
    let why = say(&server, false, &bytes);
    assert!(why.contains("longer than any greeting"), "{why}");
}

/// A peer that sends what a test gives it.
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

    /// What makes the connection stand, without memory of its own.
    #[allow(clippy::unused_self)]
    fn greeting(&self, at: &Address, profile: &Profile) -> Vec<u8> {
        let options = EndpointOptions::new("raw", profile.clone());
        let way = Scheme::of(at);
        let mut bytes = hello(&options, way).frame();
        if way == Scheme::Pull {
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

    /// Reads some bytes; returns the descriptor that came with them.
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
fn whatever_comes_in_ends_its_own_connection_alone() {
    let tier = tier(3);
    let server = server(any_tcp(), &tier);
    let client = client();
    let peer = up(&client, &server.addresses()[0]);
    let mut version = frame(Kind::Ping, &[]);
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
    assert!(say(&server, false, &get.frame()).contains("before the greeting"));
    let mut damaged = get.frame();
    damaged[HEADER_BYTES] ^= 1;
    assert!(say(&server, true, &damaged).contains("checksum is wrong"));
    let mut kind = get.frame();
    kind[5] = 77;
    assert!(say(&server, true, &kind).contains("no frame is of this kind"));
    let mut long = get.frame();
    long[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(say(&server, true, &long).contains("longer than any frame"));
    let short = frame(Kind::Get, &[0; 15]);
    assert!(say(&server, true, &short).contains("shorter than what it says"));
    let answers = Blocks {
        request: 1,
        answers: vec![Answer::Absent],
    };
    // Answers that nobody asked for do no harm; a frame that is cut off is no frame.
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
    // The one beside it saw nothing of all that.
    let region = Region::new(BLOCK);
    assert!(
        fetch(&client, peer, &region, &[(2, BLOCK)], LONG)
            .failed
            .is_empty()
    );
}

#[test]
fn a_peer_that_answers_something_else_is_cut_off() {
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
fn blocks_that_a_peer_reads_stay_until_it_has_done() {
    // A tier of one block that is replaced all the time, while a peer fetches it.
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
fn a_reader_that_never_lets_go_is_cut_off_and_its_blocks_are_free() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let tier = tier_of(1, 2); // and room for one more
    let server = Endpoint::start(EndpointOptions {
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
    // It pings, and is not silent; but it keeps the block.
    let mut pinger = reader.try_clone().unwrap();
    let pings = std::thread::spawn(move || {
        while pinger.write_all(&frame(Kind::Ping, &[])).is_ok() {
            std::thread::yield_now();
        }
    });
    wait(&server, |event| {
        matches!(event, Event::Up { .. }).then_some(())
    });
    while server.stats().served_blocks_total == 0 {
        std::thread::yield_now();
    }
    let now = clock::now();
    tier.put(now, &key(1), &block(1)).unwrap();
    tier.put(now, &key(2), &block(2)).unwrap(); // in place of 1, as 0 is being read
    assert!(tier.remove(&key(0)));
    assert!(tier.len_of(now, &key(1)).is_none());
    let (why, _) = down(&server);
    assert!(why.contains("did not take what it asked for"), "{why}");
    pings.join().unwrap();
    tier.put(now, &key(3), &block(3)).unwrap();
    assert!(
        tier.len_of(now, &key(2)).is_some(),
        "the place of 0 is free again"
    );
}

#[test]
fn addresses_are_read_and_others_refused() {
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
    let error = Endpoint::start(EndpointOptions {
        listen: vec![Address::Unix(path.clone())],
        ..EndpointOptions::new("second", profile())
    });
    assert!(matches!(error, Err(TransportError::Listen { .. })));
    drop(first);
    assert!(!path.exists());
}

/// Polls until `f` holds.
fn until(endpoint: &Endpoint, f: impl Fn() -> bool) {
    let late = Instant::now() + LONG;
    let mut events = Vec::new();
    while !f() {
        assert!(Instant::now() < late, "it never came");
        endpoint.poll(1, &mut events);
        std::thread::yield_now();
    }
}

#[test]
fn a_block_that_is_longer_than_a_read_comes_whole() {
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
fn a_read_that_ends_after_its_deadline_touches_nothing_and_then_frees_its_blocks() {
    let tier = tier(3);
    let server = stand_in_server(&tier);
    let switch = Arc::new(Switch::default());
    let client = start_reading(EndpointOptions::new("client", profile()), &switch);
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
    // The places are the caller's again, whatever the read still does.
    region.write(0, &mark).unwrap();
    // One more cannot begin, as this peer's slot is taken.
    let next = fetch(&client, peer, &region, &wanted, Duration::from_millis(30));
    assert_eq!(next.failed.len(), 3);
    assert_eq!(switch.posted.load(Ordering::SeqCst), 1);
    switch.held.store(false, Ordering::SeqCst);
    until(&client, || switch.ended.load(Ordering::SeqCst) == 1);
    let mut out = vec![0; 3 * BLOCK];
    region.read(0, &mut out).unwrap();
    assert!(out == mark, "bytes came too late and were written");
    let done = fetch(&client, peer, &region, &wanted, LONG);
    assert!(done.failed.is_empty(), "{done:?}");
    region.read(BLOCK, &mut out[..BLOCK]).unwrap();
    assert!(out[..BLOCK] == block(1));
    // Nothing is pinned any more: every place can be taken anew.
    until(&client, || {
        (10..14).all(|n| tier.put(clock::now(), &key(n), &block(n)).is_ok())
    });
}

#[test]
fn a_read_that_fails_ends_the_connection_and_the_next_one_works() {
    let tier = tier(2);
    let server = stand_in_server(&tier);
    let switch = Arc::new(Switch::default());
    let client = start_reading(EndpointOptions::new("client", profile()), &switch);
    let region = Region::new(2 * BLOCK);
    let wanted = [(0, BLOCK), (1, BLOCK)];
    // More often than there are slots: none is lost for good.
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
fn a_peer_that_goes_while_it_is_read_costs_its_blocks_and_nothing_else() {
    let tier = tier(2);
    let gone = stand_in_server(&tier);
    let other = stand_in_server(&tier);
    let switch = Arc::new(Switch::default());
    let client = start_reading(EndpointOptions::new("client", profile()), &switch);
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
    // Its end and the transfer's may be reported in either order.
    let (mut failed, mut is_down) = (None, false);
    while failed.is_none() || !is_down {
        wait(&client, |event| {
            match event {
                Event::Done(done) if done.transfer == id => failed = Some(done.failed.clone()),
                Event::Down { .. } => is_down = true,
                _ => {}
            }
            Some(())
        });
    }
    assert_eq!(failed.unwrap(), [(0, FetchError::Lost)]);
    // The read is still under way, and its slot is not for others.
    switch.held.store(false, Ordering::SeqCst);
    until(&client, || switch.ended.load(Ordering::SeqCst) == 1);
    let peer = up(&client, &other.addresses()[0]);
    let done = fetch(&client, peer, &region, &[(1, BLOCK)], LONG);
    assert!(done.failed.is_empty(), "{done:?}");
}

#[test]
fn who_moves_blocks_otherwise_is_refused_and_who_follows_keys_is_not() {
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
    let without = Endpoint::start(EndpointOptions::new("without", profile())).unwrap();
    without.connect(&Address::Nixl(at)).unwrap();
    let (why, refused) = down(&without);
    assert!(refused && why.contains("pip install"), "{why}");
    let keys_only = Endpoint::start(EndpointOptions {
        nixl: Nixl::Keys,
        ..EndpointOptions::new("keys", profile())
    });
    let keys_only = keys_only.unwrap();
    let peer = up(&keys_only, &server.addresses()[0]);
    let done = fetch(&keys_only, peer, &Region::new(BLOCK), &[(0, BLOCK)], LONG);
    assert_eq!(done.failed, [(0, FetchError::Lost)]);
    let listens = Endpoint::start(EndpointOptions {
        listen: vec![any_nixl()],
        ..EndpointOptions::new("without", profile())
    });
    let error = listens.err().unwrap().to_string();
    assert!(error.contains("pip install 'slipstream[nixl]'"), "{error}");
    let missing = Endpoint::start(EndpointOptions {
        nixl: Nixl::On(NixlOptions::new("/nowhere/libnixl_capi.so".as_ref())),
        ..EndpointOptions::new("missing", profile())
    });
    let error = missing.err().unwrap().to_string();
    for part in ["/nowhere/libnixl_capi.so", "pip install 'slipstream[nixl]'"] {
        assert!(error.contains(part), "{error}");
    }
}
