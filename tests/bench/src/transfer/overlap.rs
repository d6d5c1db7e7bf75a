//! Copies at the same time as kernels, or as copies in the other direction. `overlap` is the share of
//! the shorter one that took no extra time.

use std::time::Duration;

use aquifer::kernels::Kernels;
use aquifer::{Pending, Stream};
use aquifer_stress::exit::Failure;

use super::meter::Meter;
use crate::row::Row;

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

pub(super) fn run(meter: &Meter) -> Result<Vec<Row>, Failure> {
    let bytes = meter.largest();
    let (from, mut to) = (meter.pinned(bytes)?, meter.pinned(bytes)?);
    let (mut target, mut source) = (meter.buffer(bytes)?, meter.buffer(bytes)?);
    // Memory that was never written may not be read.
    source.upload(&from, &meter.transfer)?.wait()?;
    let kernels = meter.transfer.allocator().kernels()?;
    let transfer = &meter.transfer;

    let up = meter.time(|| Ok(target.upload(&from, &transfer)?.wait()?))?;
    let down = meter.time(|| Ok(source.download(&mut to, &transfer)?.wait()?))?;
    let busy = Duration::from_secs_f64(up.max(down) / 1e9);
    let kernel = meter.time(|| {
        keep_busy(&kernels, &meter.stream, busy)?;
        Ok(meter.stream.synchronize()?)
    })?;

    let beside_up = meter.time(|| {
        keep_busy(&kernels, &meter.stream, busy)?;
        target.upload(&from, &transfer)?.wait()?;
        Ok(meter.stream.synchronize()?)
    })?;
    let beside_down = meter.time(|| {
        keep_busy(&kernels, &meter.stream, busy)?;
        source.download(&mut to, &transfer)?.wait()?;
        Ok(meter.stream.synchronize()?)
    })?;
    let both = meter.time(|| {
        let up = target.upload(&from, &transfer)?;
        let down = source.download(&mut to, &transfer)?;
        Ok(Pending::join(up, down).wait().map(drop)?)
    })?;

    let row = |(what, first, second, together): (&str, f64, f64, f64)| {
        let row = meter.row(false).with("what", what).with("bytes", bytes).with("first_ms", first / 1e6);
        let row = row.with("second_ms", second / 1e6).with("together_ms", together / 1e6);
        row.with("overlap", overlap(first, second, together))
    };
    let both = ("upload and download", up, down, both);
    let all = [("kernel and upload", kernel, up, beside_up), ("kernel and download", kernel, down, beside_down), both];
    Ok(all.map(row).into())
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
