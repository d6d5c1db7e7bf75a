//! Copies at the same time as kernels, or as copies in the other direction.

use std::time::Duration;

use aquifer::kernels::Kernels;
use aquifer::{Pending, Stream};
use serde::Serialize;

use super::meter::Meter;
use crate::commands::{hundredths, kind_of_time};
use crate::exit::Failure;
use crate::session::Session;
use crate::table::{Column, table};
use crate::text::Bytes;

/// A row of results. `transfer --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
struct Row {
    part: &'static str,
    device: String,
    modelled: bool,
    clock: &'static str,
    what: &'static str,
    bytes: u64,
    first_ms: f64,
    second_ms: f64,
    together_ms: f64,
    overlap: f64,
}

/// The part of the shorter one that took no additional time.
fn overlap(first: f64, second: f64, together: f64) -> f64 {
    ((first + second - together) / first.min(second)).clamp(0.0, 1.0)
}

/// The durations of consecutive kernels that take `time` together.
fn parts(mut time: Duration) -> impl Iterator<Item = Duration> {
    std::iter::from_fn(move || {
        let part = time.min(Kernels::SPIN_MAX);
        time -= part;
        (part > Duration::ZERO).then_some(part)
    })
}

fn keep_busy(kernels: &Kernels, stream: &Stream, time: Duration) -> Result<(), Failure> {
    parts(time).try_for_each(|part| Ok(kernels.spin(stream, part)?))
}

pub(super) fn run(session: &Session, meter: &Meter) -> Result<(), Failure> {
    let bytes = meter.largest();
    let (from, mut to) = (meter.pinned(bytes)?, meter.pinned(bytes)?);
    let (mut target, mut source) = (meter.buffer(bytes)?, meter.buffer(bytes)?);
    // Memory that was never written may not be read.
    meter.transfer.upload(&from, &mut source)?.wait()?;
    let kernels = meter.transfer.allocator().kernels()?;
    let transfer = &meter.transfer;

    let up = meter.time(|| Ok(transfer.upload(&from, &mut target)?.wait()?))?;
    let down = meter.time(|| Ok(transfer.download(&source, &mut to)?.wait()?))?;
    let busy = Duration::from_secs_f64(up.max(down) / 1e9);
    let kernel = meter.time(|| {
        keep_busy(&kernels, &meter.stream, busy)?;
        Ok(meter.stream.synchronize()?)
    })?;

    let beside_up = meter.time(|| {
        keep_busy(&kernels, &meter.stream, busy)?;
        transfer.upload(&from, &mut target)?.wait()?;
        Ok(meter.stream.synchronize()?)
    })?;
    let beside_down = meter.time(|| {
        keep_busy(&kernels, &meter.stream, busy)?;
        transfer.download(&source, &mut to)?.wait()?;
        Ok(meter.stream.synchronize()?)
    })?;
    let both = meter.time(|| {
        let up = transfer.upload(&from, &mut target)?;
        let down = transfer.download(&source, &mut to)?;
        Ok(Pending::join(up, down).wait().map(drop)?)
    })?;

    let row = |(what, first, second, together)| Row {
        part: "overlap",
        device: meter.device.clone(),
        modelled: meter.is_modelled(),
        clock: meter.clock(),
        what,
        bytes,
        first_ms: hundredths(first / 1e6),
        second_ms: hundredths(second / 1e6),
        together_ms: hundredths(together / 1e6),
        overlap: hundredths(overlap(first, second, together)),
    };
    let rows = [
        ("kernel and upload", kernel, up, beside_up),
        ("kernel and download", kernel, down, beside_down),
        ("upload and download", up, down, both),
    ]
    .map(row);
    rows.iter().try_for_each(|row| session.row(row))?;
    let columns: [Column<Row>; 7] = [
        ("what", |row| row.what.to_owned()),
        ("size", |row| Bytes(row.bytes).to_string()),
        ("first, ms", |row| format!("{:.2}", row.first_ms)),
        ("second, ms", |row| format!("{:.2}", row.second_ms)),
        ("together, ms", |row| format!("{:.2}", row.together_ms)),
        ("overlap", |row| format!("{:.2}", row.overlap)),
        ("times", |row| kind_of_time(row.modelled)),
    ];
    session.show("\nTwo things at the same time, and how much of the shorter one took no extra time")?;
    session.show(table(&rows, 1, &columns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_times_are_kept_busy_by_several_kernels() {
        let ms = Duration::from_millis;
        for (time, count) in [(0, 0), (1, 1), (1000, 1), (1001, 2), (2300, 3)] {
            assert_eq!(parts(ms(time)).sum::<Duration>(), ms(time));
            assert_eq!(parts(ms(time)).filter(|&part| part <= Kernels::SPIN_MAX).count(), count);
        }
    }

    #[test]
    fn overlap_is_the_share_of_the_shorter_that_took_no_time() {
        assert!((overlap(10.0, 4.0, 10.0) - 1.0).abs() < 1e-9);
        assert!((overlap(10.0, 4.0, 12.0) - 0.5).abs() < 1e-9);
        assert!(overlap(10.0, 4.0, 15.0).abs() < 1e-9);
    }
}
