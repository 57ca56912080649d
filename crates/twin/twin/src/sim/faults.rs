//! Events of the cluster file begin and end.

use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::Fault;

use super::Sim;
use super::loss::Kept;
use crate::event::Event;
use crate::faults::restarts;
use crate::parts::ns;
use crate::run::Sink;

impl Sim<'_> {
    pub(super) fn begin_event(&mut self, index: u32, sink: &mut dyn Sink) {
        let event = &self.cluster.events[index as usize];
        self.faults.set_active(index, true);
        if let Some(until_s) = event.until_s {
            let at = SimTime::from_secs_f64(until_s);
            self.agenda.plan(at, Event::End { event: index });
        }
        match event.fault {
            Fault::Frontend => return self.lose_frontend(sink),
            Fault::Partition { peer_deadline_s } => return self.divide(index, peer_deadline_s),
            Fault::Upgrade { .. } => return self.faults.upgrades.begin(index, &event.workers),
            Fault::Uplink { leaf, .. } => return self.refresh_uplinks(leaf),
            _ => {}
        }
        let worker = WorkerId(event.workers[0]);
        match event.fault {
            Fault::Crash if !self.faults.is_down(worker) => {
                self.lose_worker(worker, Kept::Nothing, sink);
            }
            Fault::Gpu { detect_s } => {
                let start = self.faults.starts_of(worker);
                self.hang(worker);
                let at = self.agenda.now + ns(detect_s * 1e9);
                let event = index;
                self.agenda.plan(at, Event::Detect { event, start });
            }
            _ => {}
        }
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    pub(super) fn end_event(&mut self, index: u32, sink: &mut dyn Sink) {
        self.faults.set_active(index, false);
        let event = &self.cluster.events[index as usize];
        match event.fault {
            Fault::Frontend => return self.start_frontend(),
            Fault::Partition { .. } => return self.rejoin(index, sink),
            Fault::Uplink { leaf, .. } => return self.refresh_uplinks(leaf),
            _ => {}
        }
        let worker = WorkerId(event.workers[0]);
        if restarts(event.fault)
            && self.faults.is_down(worker)
            && !self.faults.keeps_down(&self.cluster.events, worker)
        {
            self.start_worker(worker);
        }
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    /// Sets the rate of a leaf switch's links to the spine according to those that are down.
    fn refresh_uplinks(&mut self, of: u32) {
        let down = self.faults.uplinks_down(&self.cluster.events, of);
        let spines = f64::from(self.cluster.network.spines);
        let share = 1.0 - down as f64 / spines;
        self.wire.set_uplink_share(self.agenda.now, of, share);
    }

    /// Starts a lost worker: it takes requests once it is up.
    pub(super) fn start_worker(&mut self, worker: WorkerId) {
        let (start, startup_ns) = self.faults.start(worker);
        let ready = Event::Ready {
            worker: worker.0,
            start,
        };
        self.agenda.plan(self.agenda.now + startup_ns, ready);
    }

    /// A worker has started, unless a later start superseded this one.
    pub(super) fn worker_ready(&mut self, worker: u32, start: u32) {
        let worker = WorkerId(worker);
        if self.faults.is_started(worker, start) {
            self.refresh_worker(worker);
            self.replace_lost(worker);
            self.faults.upgrades.on_started(worker);
        }
    }

    /// No pass of a worker ends any more.
    fn hang(&mut self, worker: WorkerId) {
        if !self.faults.is_down(worker) {
            let nodes = self.nodes.iter_mut();
            for node in nodes.filter(|node| node.rank.worker == worker) {
                node.hang();
            }
        }
    }

    /// A worker that lost a GPU ends, unless it has ended since. Without an end of the event it starts again at once.
    pub(super) fn gpu_detected(&mut self, index: u32, start: u32, sink: &mut dyn Sink) {
        let event = &self.cluster.events[index as usize];
        let worker = WorkerId(event.workers[0]);
        let runs = !self.faults.is_down(worker);
        if runs && self.faults.starts_of(worker) == start {
            self.lose_worker(worker, Kept::Nothing, sink);
        }
        if event.until_s.is_none() {
            self.end_event(index, sink);
        } else {
            self.refresh_worker(worker);
            self.replace_lost(worker);
        }
    }
}
