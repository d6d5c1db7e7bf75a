//! The in-flight set of a runtime: everything that it began and that is not known to be complete.
//!
//! The set has the latest tick of each stream, which covers the earlier ones, and each unfinished
//! job. Complete work is dropped whenever the set has twice as many entries as after the last drop,
//! so a transfer costs a few queries.
//!
//! Lock order: the set's lock, then those of timelines and jobs.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::Tick;
use aquifer_device::fork::Mutex;

use crate::error::TransferError;
use crate::job::{Job, JobProgress};

/// A set of at most this many entries is not searched for complete ones.
const FEW: usize = 64;

/// Transfers that may not be complete.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    /// By device and timeline, in an order that no hash decides.
    ticks: BTreeMap<(u32, u32), Tick>,
    jobs: Vec<Arc<Job>>,
    /// The number of entries after the last drop.
    len_then: usize,
}

impl InFlight {
    /// Adds work that was enqueued before the tick.
    pub(crate) fn note_tick(&self, tick: &Tick) {
        let mut list = self.0.lock();
        let key = (tick.timeline().device_id(), tick.timeline().id());
        let latest = list.ticks.entry(key).or_insert_with(|| tick.clone());
        if latest.n() < tick.n() {
            *latest = tick.clone();
        }
        list.thin();
    }

    pub(crate) fn note_job(&self, job: &Arc<Job>) {
        let mut list = self.0.lock();
        list.jobs.push(job.clone());
        list.thin();
    }

    /// Whether everything is known to be complete.
    pub(crate) fn is_empty(&self) -> bool {
        let mut list = self.0.lock();
        list.drop_complete();
        list.len_then == 0
    }

    /// Waits for all present entries, complete or failed, and returns the first error of a wait.
    pub(crate) fn wait(&self) -> Result<(), TransferError> {
        let (mut ticks, jobs): (Vec<Tick>, Vec<Arc<Job>>) = {
            let list = self.0.lock();
            (list.ticks.values().cloned().collect(), list.jobs.clone())
        };
        ticks.extend(jobs.iter().filter_map(|job| match job.wait() {
            JobProgress::Enqueued(tick) => Some(tick),
            JobProgress::Working | JobProgress::Finished(_) => None,
        }));
        let waited = ticks.iter().map(Tick::synchronize).fold(Ok(()), Result::and);
        Ok(waited?)
    }
}

impl List {
    fn thin(&mut self) {
        if self.ticks.len() + self.jobs.len() > FEW.max(2 * self.len_then) {
            self.drop_complete();
        }
    }

    fn drop_complete(&mut self) {
        // An error of a query says nothing: the entry stays, and a later call asks again.
        let is_open = |tick: &Tick| !tick.is_done().unwrap_or(false);
        self.ticks.retain(|_, tick| is_open(tick));
        self.jobs.retain(|job| match job.progress() {
            JobProgress::Working => true,
            JobProgress::Enqueued(tick) => is_open(&tick),
            JobProgress::Finished(_) => false,
        });
        self.len_then = self.ticks.len() + self.jobs.len();
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn complete_work_is_forgotten() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let (in_flight, open) = (InFlight::default(), Job::new());
        in_flight.note_job(&open);
        for nth in 0..1000 {
            let (stream, job) = (device.stream().unwrap(), Job::new());
            in_flight.note_job(&job);
            match nth % 2 {
                0 => job.finish(Ok(())),
                _ => job.enqueued(stream.tick()),
            }
            stream.tick().cover().unwrap();
            in_flight.note_tick(&stream.tick());
            stream.synchronize().unwrap();
            let list = in_flight.0.lock();
            assert!(list.ticks.len() + list.jobs.len() <= 2 * FEW, "{nth}");
        }
        open.finish(Err(TransferError::AlreadyTaken));
        assert!(in_flight.is_empty());
    }

    #[test]
    fn the_latest_tick_of_each_stream_counts() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let (in_flight, stream) = (InFlight::default(), device.stream().unwrap());
        let ticks = [(); 3].map(|()| {
            let tick = stream.tick();
            tick.cover().unwrap();
            tick
        });
        for at in [0, 2, 1] {
            in_flight.note_tick(&ticks[at]);
        }
        let listed: Vec<u64> = in_flight.0.lock().ticks.values().map(Tick::n).collect();
        assert_eq!(listed, [ticks[2].n()]);
    }
}
