//! The fleets of a cluster in which some workers compute prompts for others.

use std::sync::Arc;

use slipstream_base::{KvDelta, RankId, Role, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_kvindex::Applied;

use crate::fleet::{Fleet, FleetError};
use crate::witness::Testimony;

/// The fleets for prompts and for answers. A worker belongs to one of the two, by its pool's role.
#[derive(Clone)]
pub struct Fleets {
    /// Takes whole requests, and answers whose prompts were computed elsewhere.
    pub serve: Arc<Fleet>,
    /// Takes prompts, if pools have that role.
    pub prefill: Option<Arc<Fleet>>,
}

impl Fleets {
    /// The fleets of `cluster`.
    ///
    /// # Errors
    /// As [`Fleet::of_roles`].
    pub fn of_cluster(cluster: &Cluster) -> Result<Fleets, FleetError> {
        Fleets::of_cluster_with(cluster, |fleet| fleet)
    }

    /// The fleets of `cluster`, each changed by `with`.
    ///
    /// # Errors
    /// As [`Fleet::of_roles`].
    pub fn of_cluster_with(
        cluster: &Cluster,
        with: impl Fn(Fleet) -> Fleet,
    ) -> Result<Fleets, FleetError> {
        let of =
            |roles: &[Role]| Fleet::of_roles(cluster, roles).map(|fleet| Arc::new(with(fleet)));
        Ok(Fleets {
            serve: of(&[Role::Both, Role::Decode])?,
            prefill: if cluster.hands_over() {
                Some(of(&[Role::Prefill])?)
            } else {
                None
            },
        })
    }

    /// Whether `worker` computes prompts for others.
    pub fn is_prefill(&self, worker: WorkerId) -> bool {
        let has = |fleet: &Arc<Fleet>| !fleet.targets_of(worker).is_empty();
        self.prefill.as_ref().is_some_and(has)
    }

    /// Number of workers: one more than the highest.
    pub fn workers(&self) -> usize {
        let last = |fleet: &Arc<Fleet>| fleet.targets().last().map(|of| of.rank.worker.index() + 1);
        self.each().filter_map(last).max().unwrap_or(0)
    }

    /// The fleet that has `rank` as a target; the serving one if neither has.
    #[inline]
    pub fn of(&self, rank: RankId) -> &Arc<Fleet> {
        match &self.prefill {
            Some(prefill) if prefill.target_of(rank).is_some() => prefill,
            _ => &self.serve,
        }
    }

    /// Both, or the only one.
    pub fn each(&self) -> impl Iterator<Item = &Arc<Fleet>> {
        std::iter::once(&self.serve).chain(&self.prefill)
    }

    /// As [`Fleet::set_ready`].
    pub fn set_ready(&self, worker: WorkerId, ready: bool) {
        self.each().for_each(|fleet| fleet.set_ready(worker, ready));
    }

    /// As [`Fleet::on_worker_lost`].
    pub fn on_worker_lost(&self, worker: WorkerId) {
        self.each().for_each(|fleet| fleet.on_worker_lost(worker));
    }

    /// As [`Fleet::forget_cache`].
    pub fn forget_cache(&self, worker: WorkerId) {
        self.each().for_each(|fleet| fleet.forget_cache(worker));
    }

    /// As [`Fleet::set_guessed`].
    pub fn set_guessed(&self, worker: WorkerId, guessed: bool) {
        self.each()
            .for_each(|fleet| fleet.set_guessed(worker, guessed));
    }

    /// As [`Fleet::testimony`].
    pub fn testimony(&self, worker: WorkerId, engine_block_size: u32) -> Testimony {
        let each = self
            .each()
            .map(|fleet| fleet.testimony(worker, engine_block_size));
        each.fold(Testimony::default(), |sum, of| Testimony {
            found: sum.found + of.found,
            missing: sum.missing + of.missing,
        })
    }

    /// As [`Fleet::on_kv`].
    pub fn on_kv(&self, delta: &KvDelta) -> Applied {
        self.of(delta.rank).on_kv(delta)
    }

    /// As [`Fleet::expect_kv`].
    pub fn expect_kv(&self, delta: &KvDelta) {
        self.of(delta.rank).expect_kv(delta);
    }

    /// As [`Fleet::resync`].
    pub fn resync(&self, snapshot: &KvDelta) {
        self.of(snapshot.rank).resync(snapshot);
    }
}

impl From<Fleet> for Fleets {
    /// A fleet for whole requests only.
    fn from(serve: Fleet) -> Fleets {
        Fleets {
            serve: Arc::new(serve),
            prefill: None,
        }
    }
}
