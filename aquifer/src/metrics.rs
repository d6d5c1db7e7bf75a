//! Statistics for the recorders of the [`metrics`] crate, such as its exporter for Prometheus.
//!
//! The allocator counts in any case; these functions hand the counts on. Call them as often as they
//! should be recorded, for example once a step or from a thread that sleeps between calls.
//! Allocations and frees do nothing for them.
//!
//! Every metric has the label `device`, such as `cuda:0`. Values that fall are gauges, the others
//! are counters.
//!
//! | metric | unit | what it is |
//! | --- | --- | --- |
//! | `aquifer_allocated_bytes`, `aquifer_allocated_bytes_peak` | bytes | memory in live blocks |
//! | `aquifer_requested_bytes` | bytes | the part of it that was asked for, before rounding |
//! | `aquifer_active_bytes` | bytes | the same and freed blocks that other streams still use |
//! | `aquifer_reserved_bytes`, `aquifer_reserved_bytes_peak` | bytes | memory held from the device |
//! | `aquifer_live_blocks` | blocks | live blocks |
//! | `aquifer_allocations_total`, `aquifer_allocated_bytes_total` | blocks, bytes | all allocations so far |
//! | `aquifer_device_allocs_total`, `aquifer_device_frees_total` | calls | memory taken from the device, and returned |
//! | `aquifer_alloc_retries_total` | requests | how often the cache was flushed to serve a request |
//! | `aquifer_ooms_total` | requests | how often a request failed for lack of memory |
//! | `aquifer_syncs_total` | waits | how often the host waited for streams that still used freed blocks |
//! | `aquifer_remaps_total`, `aquifer_granules_moved_total` | remaps, granules | moves of free memory |
//! | `aquifer_graph_bytes_lent_total`, `aquifer_graph_bytes_returned_total` | bytes | memory that idle graphs lent, and that launches brought back |
//! | `aquifer_cross_stream_reuses_total` | blocks | how often a stream reused a block that another one had freed |
//! | `aquifer_pinned_active_bytes`, `aquifer_pinned_held_bytes` | bytes | pinned memory in use, and held |
//! | `aquifer_pinned_ooms_total` | requests | how often a request failed for lack of pinned memory |

use metrics::{counter, gauge};

use crate::allocator::Allocator;
use crate::transfer::PinnedPool;

/// Records the statistics of a device's memory. Totals start again at zero if
/// [`reset_accumulated_stats`](aquifer_allocator::Allocator::reset_accumulated_stats) is called.
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let memory = Allocator::of(&device)?;
/// // With a recorder installed, such as the one of the crate metrics-exporter-prometheus:
/// aquifer::metrics::record(&memory);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub fn record(memory: &Allocator) {
    let (stats, device) = (memory.stats(), memory.device().label().to_string());
    let gauges = [
        ("aquifer_allocated_bytes", stats.allocated_bytes.all.current),
        ("aquifer_allocated_bytes_peak", stats.allocated_bytes.all.peak),
        ("aquifer_requested_bytes", stats.requested_bytes.all.current),
        ("aquifer_active_bytes", stats.active_bytes.all.current),
        ("aquifer_reserved_bytes", stats.reserved_bytes.all.current),
        ("aquifer_reserved_bytes_peak", stats.reserved_bytes.all.peak),
        ("aquifer_live_blocks", stats.allocation.all.current),
    ];
    let counters = [
        ("aquifer_allocations_total", stats.allocation.all.allocated),
        ("aquifer_allocated_bytes_total", stats.allocated_bytes.all.allocated),
        ("aquifer_device_allocs_total", stats.num_device_alloc),
        ("aquifer_device_frees_total", stats.num_device_free),
        ("aquifer_alloc_retries_total", stats.num_alloc_retries),
        ("aquifer_ooms_total", stats.num_ooms),
        ("aquifer_syncs_total", stats.num_sync_all_streams),
        ("aquifer_remaps_total", stats.remaps),
        ("aquifer_granules_moved_total", stats.granules_moved),
        ("aquifer_graph_bytes_lent_total", stats.graph_bytes_lent),
        ("aquifer_graph_bytes_returned_total", stats.graph_bytes_returned),
        ("aquifer_cross_stream_reuses_total", stats.cross_stream_reuses),
    ];
    publish(&device, &gauges, &counters);
}

/// Records the statistics of a pool of pinned memory.
pub fn record_pinned(pool: &PinnedPool) {
    let (stats, device) = (pool.stats(), pool.device().label().to_string());
    let gauges = [
        ("aquifer_pinned_active_bytes", stats.active_bytes.current),
        ("aquifer_pinned_held_bytes", stats.allocated_bytes.current),
    ];
    publish(&device, &gauges, &[("aquifer_pinned_ooms_total", stats.num_ooms)]);
}

fn publish(device: &str, gauges: &[(&'static str, u64)], counters: &[(&'static str, u64)]) {
    for &(name, value) in gauges {
        // Exact below 2^53: the facade knows gauges as floating point only.
        gauge!(name, "device" => device.to_owned()).set(value as f64);
    }
    for &(name, value) in counters {
        counter!(name, "device" => device.to_owned()).absolute(value);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::{Arc, Mutex};

    use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

    use super::*;

    /// Keeps every value under its name and labels. The facade stores gauges as the bits of an
    /// `f64`.
    #[derive(Default)]
    struct Values(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

    impl Values {
        fn cell(&self, key: &Key) -> Arc<AtomicU64> {
            self.0.lock().unwrap().entry(key.to_string()).or_default().clone()
        }

        fn gauge(&self, name: &str) -> f64 {
            f64::from_bits(self.counter(name))
        }

        fn counter(&self, name: &str) -> u64 {
            let values = self.0.lock().unwrap();
            values.iter().find(|(key, _)| key.contains(&format!("({name},"))).expect(name).1.load(Relaxed)
        }
    }

    impl Recorder for Values {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.cell(key))
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.cell(key))
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn records_what_the_statistics_say() {
        let device = crate::open("sim:1GiB,violations=panic").unwrap();
        let (memory, stream) = (Allocator::of(&device).unwrap(), device.stream().unwrap());
        let pool = PinnedPool::new(&device);
        let pinned = pool.alloc::<u8>(1000).unwrap();
        let values = Values::default();
        let record_all = || {
            metrics::with_local_recorder(&values, || {
                record(&memory);
                record_pinned(&pool);
            });
        };
        let buffer = memory.alloc::<u8>(3 << 20, &stream).unwrap();
        memory.alloc::<u8>(2 << 30, &stream).unwrap_err();
        record_all();
        assert_eq!(values.gauge("aquifer_allocated_bytes"), f64::from(3 << 20));
        assert_eq!(values.gauge("aquifer_reserved_bytes"), memory.memory_reserved() as f64);
        assert_eq!(values.counter("aquifer_ooms_total"), 1);
        assert_eq!(values.gauge("aquifer_pinned_active_bytes"), pool.stats().active_bytes.current as f64);
        drop((buffer, pinned));
        record_all();
        assert_eq!(values.gauge("aquifer_allocated_bytes"), 0.0);
        assert_eq!(values.gauge("aquifer_allocated_bytes_peak"), f64::from(3 << 20));
        assert_eq!(values.counter("aquifer_allocations_total"), 1);
    }
}
