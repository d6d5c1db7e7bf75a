//! The cost of copies between host and device, by every method.
//!
//! * `copies`: bandwidth and latency by direction, method and size, from 4 KiB up to `--max-mb`, each
//!   16 times the previous one.
//! * `small`: many small copies, with one call each, and as a batch.
//! * `overlap`: copies at the same time as kernels, and as copies in the other direction.
//! * `nvbandwidth`: its copies, with their names: 512 MiB of pinned memory, each way and both ways.
//! * `swap_blocks`, vLLM's: 256 blocks of 4 KiB to 4 MiB in another order, each way.
//! * `model`: 7 billion parameters, or as much of them as `--max-mb` allows, from a safetensors file,
//!   with cold and warm page cache.
//!
//! Times are medians, after a first time that does not count. On a real device they are measured on
//! the host, from before the calls until it has waited for what they enqueued, so calling and waiting
//! count. On a simulated device they are its virtual time, which covers driver calls and the device's
//! own work but not the host's. So staged copies and files are not measured there. Copies from a
//! simulated peer are timed by the destination, without the peer's own work before, such as
//! collecting rows. Copies on the host are timed by the host's clock on every device.

mod copies;
mod meter;
mod model;
mod overlap;
mod published;
mod small;

use aquifer_stress::exit::Failure;

use crate::row::Row;
use crate::{Bench, Benchmark};
use meter::Meter;

type Part = fn(&Meter) -> Result<Vec<Row>, Failure>;

pub(crate) fn all() -> Vec<Benchmark> {
    let all: [(&str, Part); 6] = [
        ("copies", copies::run),
        ("small", small::run),
        ("overlap", overlap::run),
        ("nvbandwidth", published::bandwidth),
        ("swap_blocks", published::swap_blocks),
        ("model", model::run),
    ];
    let benchmark = |(name, run): (&'static str, Part)| {
        Benchmark::new(name, move |bench: &Bench| {
            let meter = Meter::new(bench, name == "copies")?;
            let rows = run(&meter)?;
            let violations = meter.violations(&bench.session);
            Ok(rows.into_iter().map(|row| row.with("violations", violations)).collect())
        })
    };
    all.map(benchmark).into()
}
