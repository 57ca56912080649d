//! The decision as the kernel runs it (`decide.bpf.c` of `cpusched`, by `BPF_PROG_RUN`) against the native
//! build, on random inputs. Needs the right to load BPF programs; skips with a message without it.

use libbpf_rs::{MapCore, MapFlags, ObjectBuilder, ProgramInput};
use slipstream_base::width::{to_i32, to_u32};
use slipstream_cpusched::policy::{Core, DOMAINS, Domain, Llc, Params, Placement, Task, Wake};
use slipstream_cpusched::rng;

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/decide.bpf.o"));
const LLCS: u32 = 4;
const PER_LLC: u32 = 8;
const INPUTS: usize = 10_000;

struct Rng(rng::Rng);

impl Rng {
    fn word(&mut self) -> u64 {
        self.0.word()
    }

    fn below(&mut self, n: u64) -> u64 {
        self.word() % n
    }

    fn few(&mut self, n: u32) -> u32 {
        to_u32(self.below(u64::from(n)))
    }

    /// Usually small, so that thresholds are met from both sides, and sometimes any value.
    fn time(&mut self) -> u64 {
        if self.below(8) == 0 {
            self.word()
        } else {
            self.below(40_000_000)
        }
    }
}

#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u64s(&mut self, words: &[u64]) {
        self.0.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
    }

    fn u32s(&mut self, words: &[u32]) {
        self.0.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
    }

    fn task(&mut self, t: &Task) {
        self.u64s(&[
            t.vtime,
            t.exec_ns,
            t.queued_at,
            t.burst_ns,
            t.sync_ns,
            t.block_ns,
            t.llc_mask,
            t.slice_cap_ns,
        ]);
        self.u32s(&[
            t.weight,
            t.llc,
            t.runs_on_llc,
            t.level,
            t.handed,
            t.honest,
            t.no_hand_off,
            t.domain,
            t.queued,
            0,
        ]);
    }

    /// Sets the domain of the tasks without a CPU mask, by LLC.
    fn domains(&mut self, core: &Core) {
        for llc in 0..LLCS {
            let d = core.domains[(llc * DOMAINS) as usize];
            self.u64s(&[d.clock, d.offset]);
        }
    }

    fn llc(&mut self, l: &Llc) {
        self.u64s(&[l.vclock, l.base, l.balance_at, l.idle_mask, l.handover_mask]);
        self.u32s(&[l.nr_cpus, l.nr_queued, l.saturated, l.overloaded]);
    }
}

fn task(r: &mut Rng) -> Task {
    Task {
        vtime: r.time(),
        exec_ns: r.time(),
        queued_at: r.time(),
        burst_ns: r.time(),
        sync_ns: r.time() * r.below(2),
        block_ns: r.below(60_000),
        llc_mask: if r.below(3) == 0 { r.word() } else { 0 },
        slice_cap_ns: if r.below(3) == 0 { r.time() } else { 0 },
        weight: r.few(10_001),
        llc: r.few(4),
        runs_on_llc: r.few(8),
        level: r.few(4),
        handed: r.few(2),
        honest: r.few(6),
        no_hand_off: u32::from(r.below(8) == 0),
        domain: 0,
        queued: r.few(2),
        pad: 0,
    }
}

#[test]
fn kernel_and_native_build_decide_alike() {
    let loaded = ObjectBuilder::default()
        .open_memory(PROGRAM)
        .and_then(libbpf_rs::OpenObject::load);
    let object = match loaded {
        Ok(object) => object,
        Err(e) => {
            // As root a rejection is an error: the verifier did not accept the policy.
            let uid =
                std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap());
            assert_ne!(uid, 0, "the kernel refused the program: {e}");
            eprintln!("SKIPPED: no right to load BPF programs: {e}");
            return;
        }
    };
    let map = object.maps().find(|m| m.name() == "decide").unwrap();
    let program = object
        .progs_mut()
        .find(|p| p.name() == "decide_once")
        .unwrap();
    let mut r = Rng(rng::Rng::new(1));
    let mut paths = [0u32; 9];
    for i in 0..INPUTS {
        let mut core = Core::new(Params::with_defaults(), LLCS, PER_LLC, 2);
        core.params.llcs_per_node = r.few(4);
        core.tasks = vec![task(&mut r), task(&mut r)]; // waker, wakee
        for llc in &mut core.llcs {
            let dense = [0, r.word() & r.word(), r.word(), 0xff][r.few(4) as usize];
            llc.idle_mask = dense & 0xff;
            llc.vclock = r.time();
            llc.nr_queued = r.few(3) * r.few(20);
            llc.saturated = u32::from(r.below(3) == 0);
            llc.overloaded = u32::from(r.below(6) == 0);
        }
        for llc in 0..LLCS {
            core.domains[(llc * DOMAINS) as usize] = Domain {
                clock: r.time(),
                offset: r.time(),
            };
        }
        let (waker_cpu, prev_cpu) = (r.few(32), r.few(32));
        let prev_level = r.few(3);
        core.cpus[prev_cpu as usize].level = prev_level;
        let masked = to_i32(r.few(33)) - 1;
        let wake = Wake {
            now: r.time(),
            rnd: r.word(),
            waker_cpu,
            prev_cpu,
            waker_llc: waker_cpu / PER_LLC,
            prev_llc: prev_cpu / PER_LLC,
            waker_queued: u32::from(r.below(4) == 0),
            nr_llcs: LLCS,
            flags: r.few(64) | if r.below(2) == 0 { 13 } else { 0 },
            pad: 0,
        };
        let (exec_ns, stop_ns, blocked) = (r.time(), r.time(), r.below(2) == 0);

        let mut input = Bytes::default();
        let config = crate::intf::params(&core.params);
        input.0.extend(config);
        input.task(&core.tasks[1]);
        input.task(&core.tasks[0]);
        input.u64s(&[wake.now, wake.rnd]);
        input.u32s(&[
            wake.waker_cpu,
            wake.prev_cpu,
            wake.waker_llc,
            wake.prev_llc,
            wake.waker_queued,
            wake.nr_llcs,
            wake.flags,
            0,
        ]);
        input.u32s(&[0; 4]);
        core.llcs.iter().for_each(|l| input.llc(l));
        input.domains(&core);
        input.u32s(&[prev_level, masked.cast_unsigned()]);
        input.u64s(&[exec_ns, stop_ns, 0, 0]);
        input.u32s(&[0, u32::from(blocked), 0, 0]);
        map.update(&0u32.to_ne_bytes(), &input.0, MapFlags::ANY)
            .unwrap();
        let ran = program.test_run(ProgramInput::default()).unwrap();
        assert_eq!(ran.return_value, 0, "input {i}");
        let got = map
            .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)
            .unwrap()
            .unwrap();

        let pinned = u32::try_from(masked).ok();
        let out: Placement = core.place(1, Some(0), wake, pinned);
        paths[out.path as usize] += 1;
        let key = core.on_runnable(1, out.llc, wake.now);
        let slice = core.slice(1, out.llc);
        core.on_sync_wake(0, exec_ns);
        let trusted = core.trusted(0);
        let lied = core.account(0, out.llc * PER_LLC, stop_ns, blocked);
        let mut expected = Bytes::default();
        expected.0.extend(crate::intf::params(&core.params));
        expected.task(&core.tasks[1]);
        expected.task(&core.tasks[0]);
        expected
            .0
            .extend(&input.0[expected.0.len()..expected.0.len() + 48]);
        expected.u32s(&[out.path, out.cpu, out.llc, out.refused]);
        core.llcs.iter().for_each(|l| expected.llc(l));
        expected.domains(&core);
        expected.u32s(&[prev_level, masked.cast_unsigned()]);
        expected.u64s(&[exec_ns, stop_ns, slice, key]);
        expected.u32s(&[u32::from(lied), u32::from(blocked), u32::from(trusted), 0]);
        assert_eq!(got, expected.0, "input {i}: {out:?}");
    }
    assert!(
        paths.iter().all(|&n| n > 20),
        "every path is taken: {paths:?}"
    );
}
