//! The time of the calls that programs make most, through the typed front door.
//!
//! Each benchmark repeats one call on buffers of 1024 `f32`. Rounds are shorter than a time slice of
//! the operating system, and the fastest and the median are reported. The work given to `with`
//! enqueues nothing.
//!
//! * `alloc_bytes`, `alloc`: with the drop of what it returns; `alloc_with`: and one `with` between.
//! * `slice`, `slice_mut`, `share`: a part of a buffer, and another handle.
//! * `with_read`, `with_write`, `with_two`, `with_three`, `with_eight`: by the number of buffers.
//! * `with_other_stream`: on another stream than the buffer's. `with_streams_in_turn`: on both.
//! * `with_captured`: as `with_two`, while the stream captures.

use std::hint::black_box;
use std::time::Instant;

use aquifer::Error;
use aquifer::device::DevicePtr;
use aquifer::prelude::*;
use aquifer_stress::exit::Failure;

use crate::row::Row;
use crate::{Bench, Benchmark};

const LEN: usize = 1024;
const CALLS: u32 = 1_000;
const ROUNDS: u32 = 2_000;

const ALL: [&str; 14] = [
    "alloc_bytes",
    "alloc",
    "alloc_with",
    "slice",
    "slice_mut",
    "share",
    "with_read",
    "with_write",
    "with_two",
    "with_three",
    "with_eight",
    "with_other_stream",
    "with_streams_in_turn",
    "with_captured",
];

pub(crate) fn all() -> Vec<Benchmark> {
    ALL.map(|name| Benchmark::new(name, move |bench| measure(bench, name))).into()
}

/// Stands for a launch.
#[inline]
fn enqueue<const N: usize>(ptrs: [DevicePtr; N]) -> Result<(), Error> {
    black_box(ptrs);
    Ok(())
}

fn measure(bench: &Bench, name: &str) -> Result<Vec<Row>, Failure> {
    let device = bench.session.open()?;
    let (memory, stream, other) =
        (Allocator::new(&device, bench.config.config.clone())?, device.stream()?, device.stream()?);
    let buffer = || memory.alloc::<f32>(LEN, &stream);
    // So that what is measured is not the last block of the allocator.
    let (mut x, y, z, _kept) = (buffer()?, buffer()?, buffer()?, buffer()?);
    let eight = (0..8).map(|_| buffer()).collect::<Result<Vec<_>, _>>()?;
    let rounds = bench.args.rounds.unwrap_or(if bench.args.quick { ROUNDS / 50 } else { ROUNDS });
    let bytes = (LEN * size_of::<f32>()) as u64;
    let row = match name {
        "alloc_bytes" => timed(rounds, || Ok(memory.alloc_bytes(bytes, &stream)?)),
        "alloc" => timed(rounds, buffer),
        "alloc_with" => timed(rounds, || {
            let mut x = buffer()?;
            with(&stream, [write(&mut x)], |_, [x]| enqueue([x.ptr()]))?;
            Ok(())
        }),
        "slice" => timed(rounds, || Ok(x.slice(black_box(100)..black_box(900)).ptr())),
        "slice_mut" => timed(rounds, || Ok(x.slice_mut(black_box(100)..black_box(900)).ptr())),
        "share" => timed(rounds, || Ok(x.share())),
        "with_read" => timed(rounds, || Ok(with(&stream, [read(&x)], |_, [x]| enqueue([x.ptr()]))?)),
        "with_write" => timed(rounds, || Ok(with(&stream, [write(&mut x)], |_, [x]| enqueue([x.ptr()]))?)),
        "with_two" => {
            timed(rounds, || Ok(with(&stream, [read(&y), write(&mut x)], |_, [y, x]| enqueue([y.ptr(), x.ptr()]))?))
        }
        "with_three" => timed(rounds, || {
            let accesses = [read(&z), read(&y), write(&mut x)];
            Ok(with(&stream, accesses, |_, all| enqueue(all.map(|one| one.ptr())))?)
        }),
        "with_eight" => timed(rounds, || {
            let accesses: [_; 8] = std::array::from_fn(|at| read(&eight[7 - at]));
            Ok(with(&stream, accesses, |_, all| enqueue(all.map(|one| one.ptr())))?)
        }),
        "with_other_stream" => timed(rounds, || Ok(with(&other, [read(&y)], |_, [y]| enqueue([y.ptr()]))?)),
        "with_streams_in_turn" => timed(rounds, || {
            with(&other, [read(&y)], |_, [y]| enqueue([y.ptr()]))?;
            Ok(with(&stream, [read(&y)], |_, [y]| enqueue([y.ptr()]))?)
        }),
        _ => {
            let mut row = Ok(Row::new());
            // The second call, whose row stays, is captured.
            memory.graph(&stream, |stream| {
                row = timed(rounds, || {
                    Ok(with(stream, [read(&y), write(&mut x)], |_, [y, x]| enqueue([y.ptr(), x.ptr()]))?)
                });
                Ok(())
            })?;
            row
        }
    };
    Ok(vec![row?])
}

/// The time of a call: the least and the median of the rounds.
fn timed<R>(rounds: u32, mut call: impl FnMut() -> Result<R, Error>) -> Result<Row, Error> {
    for _ in 0..10 * CALLS {
        drop(black_box(call()?));
    }
    let mut round = || {
        let start = Instant::now();
        for _ in 0..CALLS {
            drop(black_box(call()?));
        }
        Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS))
    };
    let mut times = (0..rounds.max(1)).map(|_| round()).collect::<Result<Vec<f64>, Error>>()?;
    times.sort_by(f64::total_cmp);
    Ok(Row::new().with("rounds", times.len()).with("least_ns", times[0]).with("median_ns", times[times.len() / 2]))
}
