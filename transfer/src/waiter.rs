//! Threads that wait for ticks and wake tasks, so that tasks need neither poll nor block.
//!
//! A background thread ([`foreign_code::send`]) waits on the host for the earliest tick of a timeline
//! that was asked for (the driver puts it to sleep meanwhile), wakes the task, and goes on with the
//! next one. A request for an earlier tick than any thread of the timeline waits for gets another
//! thread. Once a timeline has as many as it may have, the request waits for one of them.
//!
//! Wakers are foreign code, which may wait for any other transfer. A thread that finds no other
//! request gives its place up and runs the waker itself; else another thread runs it.
//!
//! Invariant: each request is finished, at the latest with the error of a lost device. While there
//! are requests, the timeline has a thread, which ends only when there are none.
//!
//! The lock comes before those of jobs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use aquifer_device::Tick;
use aquifer_device::fork::Mutex;

use crate::foreign_code::{self, DRIVER, guarded};
use crate::job::Job;

/// Most threads that wait for ticks of one timeline.
const THREADS_MAX: usize = 4;

/// The requests of a runtime, by device and timeline.
#[derive(Debug, Default)]
pub(crate) struct Waiter(Mutex<HashMap<Key, Requests>>);

/// A device and a timeline.
type Key = (u32, u32);

#[derive(Debug, Default)]
struct Requests {
    /// By the tick's place on the timeline, then in the order of the requests.
    waiting: BTreeMap<(u64, u64), (Tick, Arc<Job>)>,
    count: u64,
    /// The tick that each thread waits for.
    threads: Vec<u64>,
}

impl Waiter {
    /// A job that is finished once the tick is done.
    pub(crate) fn watch(self: &Arc<Self>, tick: Tick) -> Arc<Job> {
        let (job, n, key) = (Job::new(), tick.n(), (tick.timeline().device_id(), tick.timeline().id()));
        let mut timelines = self.0.lock();
        let requests = timelines.entry(key).or_default();
        requests.count += 1;
        requests.waiting.insert((n, requests.count), (tick, job.clone()));
        if requests.threads.len() < THREADS_MAX && requests.threads.iter().all(|&awaited| awaited > n) {
            requests.threads.push(n);
            drop(timelines);
            let waiter = self.clone();
            foreign_code::send(Box::new(move || foreign_code::with_deferring(true, || waiter.serve(key, n))));
        }
        job
    }

    /// Waits for ticks, in the place of a thread that waits for `awaited`.
    fn serve(&self, key: Key, awaited: u64) {
        let mut next = self.next(key, awaited);
        while let Some((n, tick, job)) = next {
            let result = guarded(DRIVER, || Ok(tick.synchronize()?));
            drop(tick);
            next = self.next(key, n);
            foreign_code::with_deferring(next.is_some(), || job.finish(result));
        }
    }

    /// The earliest request, for the thread that waited for `awaited`; without one it loses its
    /// place.
    fn next(&self, key: Key, awaited: u64) -> Option<(u64, Tick, Arc<Job>)> {
        let mut timelines = self.0.lock();
        let requests = timelines.get_mut(&key)?;
        let place = requests.threads.iter().position(|&at| at == awaited)?;
        if let Some(((n, _), (tick, job))) = requests.waiting.pop_first() {
            requests.threads[place] = n;
            return Some((n, tick, job));
        }
        requests.threads.swap_remove(place);
        if requests.threads.is_empty() {
            timelines.remove(&key);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::job::JobProgress;

    /// Two ticks of one stream, the earlier one first.
    fn ticks() -> [Tick; 2] {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let stream = device.stream().unwrap();
        let memory = device.alloc(1 << 20).unwrap();
        [0, 1].map(|byte| {
            stream.fill(memory, byte, 1 << 20).unwrap();
            let tick = stream.tick();
            tick.cover().unwrap();
            tick
        })
    }

    #[test]
    fn an_earlier_tick_does_not_wait_for_a_later_one() {
        let [earlier, later] = ticks();
        let waiter = Arc::new(Waiter::default());
        // A thread that waits for the later one, for ever.
        let key = (earlier.timeline().device_id(), earlier.timeline().id());
        waiter.0.lock().insert(key, Requests { threads: vec![later.n()], ..Requests::default() });
        assert!(matches!(waiter.watch(earlier).wait(), JobProgress::Finished(Ok(()))));
        // The thread of the earlier one may serve this until it has given its place up.
        while waiter.0.lock()[&key].threads.len() > 1 {
            std::thread::yield_now();
        }
        let after = waiter.watch(later);
        let timelines = waiter.0.lock();
        assert_eq!(
            (timelines[&key].waiting.len(), timelines[&key].threads.len()),
            (1, 1),
            "it joins the present thread"
        );
        assert!(matches!(after.poll(Waker::noop()), JobProgress::Working));
    }
}
