//! LoRA adapters: how many a pass may use, and the time to load those that are not there.
//!
//! Sources: vLLM 0.33, `Scheduler.schedule` (`scheduled_loras`: of all running requests; a waiting one whose adapter would be
//! one too many is passed over) and `LRUCacheWorkerLoRAManager` in `vllm/lora/worker_manager.py` (a pass begins by loading its adapters).

use slipstream_config::cluster::LoraConfig;

use super::Engine;
use super::schedule::Plan;

/// Adapters of an engine.
pub(super) struct Adapters {
    max_loras: usize,
    max_cpu_loras: usize,
    load_ns: u64,
    activate_ns: u64,
    /// On the GPUs, least recently used first.
    active: Vec<u64>,
    /// In host memory, those on the GPUs included; least recently used first.
    cached: Vec<u64>,
    /// Of the running sequences.
    running: Vec<u64>,
    /// Of the pass that was scheduled, in the order of its sequences.
    scheduled: Vec<u64>,
    /// Adapters loaded into host memory so far.
    pub(super) loads: u64,
    /// Adapters copied to the GPUs so far.
    pub(super) activations: u64,
}

/// The model itself, without an adapter.
const NONE: u64 = 0;

impl Adapters {
    pub(super) fn new(config: &LoraConfig) -> Adapters {
        Adapters {
            max_loras: config.max_loras as usize,
            max_cpu_loras: config.max_cpu_loras.max(config.max_loras) as usize,
            load_ns: config.load_ns,
            activate_ns: config.activate_ns,
            active: Vec::new(),
            cached: Vec::new(),
            running: Vec::new(),
            scheduled: Vec::new(),
            loads: 0,
            activations: 0,
        }
    }

    /// Forgets what is loaded: the worker's process has ended.
    pub(super) fn clear(&mut self) {
        self.active.clear();
        self.cached.clear();
    }

    /// Whether no sequence of `adapter` may run beside those that run.
    pub(super) fn is_one_too_many(&self, adapter: u64) -> bool {
        adapter != NONE && self.running.len() >= self.max_loras && !self.running.contains(&adapter)
    }

    /// A sequence of `adapter` runs from now on.
    pub(super) fn run(&mut self, adapter: u64) {
        note(&mut self.running, adapter);
    }

    /// Loads the adapters of the pass that was scheduled. Returns the time that takes before it begins, ns.
    fn load_scheduled(&mut self) -> u64 {
        let scheduled = std::mem::take(&mut self.scheduled);
        let ns = scheduled.iter().map(|&adapter| self.load(adapter)).sum();
        self.scheduled = scheduled;
        ns
    }

    fn load(&mut self, adapter: u64) -> u64 {
        let mut ns = 0;
        if !take(&mut self.cached, adapter) {
            if self.cached.len() >= self.max_cpu_loras {
                let oldest = self.cached.remove(0);
                take(&mut self.active, oldest);
            }
            self.loads += 1;
            ns += self.load_ns;
        }
        self.cached.push(adapter);
        if !take(&mut self.active, adapter) {
            if self.active.len() >= self.max_loras {
                self.active.remove(0);
            }
            self.activations += 1;
            ns += self.activate_ns;
        }
        self.active.push(adapter);
        ns
    }

    /// Whether a pass that uses `adapters` loads none. They are the most recently used ones then.
    pub(super) fn are_active(&mut self, adapters: impl Iterator<Item = u64>) -> bool {
        self.scheduled.clear();
        for adapter in adapters {
            note(&mut self.scheduled, adapter);
        }
        let all = self.scheduled.iter().all(|a| self.active.contains(a));
        if all {
            self.load_scheduled();
        }
        all
    }
}

/// Adds `adapter` unless it is there, or the model itself.
fn note(to: &mut Vec<u64>, adapter: u64) {
    if adapter != NONE && !to.contains(&adapter) {
        to.push(adapter);
    }
}

/// Takes `adapter` out; false if it is not there.
fn take(of: &mut Vec<u64>, adapter: u64) -> bool {
    let at = of.iter().position(|&a| a == adapter);
    at.is_some_and(|at| of.remove(at) == adapter)
}

impl Engine {
    /// Notes the adapters of the running sequences, before others are admitted.
    pub(super) fn note_adapters(&mut self) {
        if let Some(adapters) = &mut self.adapters {
            adapters.running.clear();
            for r in &self.running {
                adapters.run(self.sequences[r.slot].request.params.adapter);
            }
        }
    }

    /// Adds the time to load its adapters to a pass that was scheduled.
    pub(super) fn load_adapters<const AHEAD: bool>(&mut self, plan: &mut Plan) {
        let Some(adapters) = &mut self.adapters else {
            return;
        };
        adapters.scheduled.clear();
        for r in &mut self.running {
            if *r.planned::<AHEAD>() > 0 {
                let adapter = self.sequences[r.slot].request.params.adapter;
                note(&mut adapters.scheduled, adapter);
            }
        }
        plan.before_ns += adapters.load_scheduled();
    }

    /// Adapters that were loaded into host memory, and copied to the GPUs, so far.
    pub fn adapter_loads(&self) -> (u64, u64) {
        let adapters = self.adapters.as_ref();
        adapters.map_or((0, 0), |a| (a.loads, a.activations))
    }
}
