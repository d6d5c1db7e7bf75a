//! Regions of ordinary memory: for any strides, each element is copied to the place of its index,
//! and no other bytes change.

use std::sync::Arc;

use aquifer::Allocator;
use aquifer::transfer::{Region, Transfer, TransferError};
use aquifer::{Error, Pending};
use aquifer_device::RequestError;
use aquifer_device::{Code, Device};
use aquifer_sim::{Fault, SimDriver};
use bytemuck::Pod;
use proptest::prelude::*;

use super::{content, sim, small, to_device};

/// Extents and strides.
#[derive(Clone, Debug)]
struct Shape {
    extents: Vec<usize>,
    from: Vec<usize>,
    to: Vec<usize>,
}

impl Shape {
    fn region(&self) -> Region<'_> {
        Region { extents: &self.extents, from_strides: &self.from, to_strides: &self.to }
    }

    /// The places where each element is read and written.
    fn places(&self) -> Vec<(usize, usize)> {
        let mut places = vec![(0, 0)];
        for ((&extent, &from), &to) in self.extents.iter().zip(&self.from).zip(&self.to) {
            let steps = (0..extent).map(|n| (n * from, n * to));
            let steps: Vec<_> = steps.collect();
            places =
                places.iter().flat_map(|at| steps.iter().map(move |step| (at.0 + step.0, at.1 + step.1))).collect();
        }
        places
    }

    /// `to` after the copy.
    fn model<T: Copy>(&self, from: &[T], to: &[T]) -> Vec<T> {
        let mut after = to.to_vec();
        self.places().into_iter().for_each(|(read, written)| after[written] = from[read]);
        after
    }

    /// Elements that either end must have.
    fn reach(&self) -> [usize; 2] {
        let places = self.places();
        [places.iter().map(|at| at.0).max(), places.iter().map(|at| at.1).max()].map(|last| last.map_or(0, |at| at + 1))
    }
}

/// Strides by which no two elements are at one place, with gaps, the dimensions in some order.
fn distinct(extents: &[usize], order: u64, gaps: &[usize]) -> Vec<usize> {
    let mut dims: Vec<usize> = (0..extents.len()).collect();
    dims.sort_by_key(|&dim| order.rotate_left(u32::try_from(dim * 13).unwrap()) % 97);
    let (mut strides, mut step) = (vec![0; extents.len()], 1);
    for dim in dims {
        strides[dim] = step + gaps[dim];
        step = strides[dim] * extents[dim];
    }
    strides
}

fn shapes() -> impl Strategy<Value = Shape> {
    let extents = prop_oneof![
        3 => prop::collection::vec(1usize..40, 0..4),
        2 => (1usize..300, 1usize..300).prop_map(|(rows, columns)| vec![rows, columns]),
        1 => Just(vec![3, 170, 170]),
    ];
    let gaps = prop::collection::vec(prop_oneof![2 => Just(0usize), 1 => 1usize..4], 3);
    (extents, any::<[u64; 2]>(), gaps.clone(), gaps, any::<u8>()).prop_map(|(extents, orders, from, to, repeat)| {
        let (mut from, to) = (distinct(&extents, orders[0], &from), distinct(&extents, orders[1], &to));
        // Some repeat elements, or read rows that overlap.
        match repeat {
            0..50 => from.iter_mut().take(1).for_each(|stride| *stride = 0),
            50..70 => from.iter_mut().for_each(|stride| *stride = (*stride).min(2)),
            _ => {}
        }
        Shape { extents, from, to }
    })
}

/// A runtime whose ring has small chunks.
fn world(seed: u64) -> (Arc<SimDriver>, Transfer) {
    let sim = SimDriver::new(sim().seed(seed));
    let device = Device::new(sim.clone());
    let allocator = Allocator::new(&device, "quarantine_mb:0").unwrap();
    (sim, Transfer::with_config(&allocator, small()).unwrap())
}

/// Copies a region to the device and back to the host in each way, and checks all bytes.
fn round_trips<T: Pod + Send + Sync + PartialEq + std::fmt::Debug>(
    shape: &Shape,
    seed: u64,
    element: impl Fn(usize) -> T,
) {
    let (sim, transfer) = world(seed);
    let stream = transfer.device().stream().unwrap();
    let [from_len, to_len] = shape.reach();
    let from: Vec<T> = (0..from_len).map(&element).collect();
    let before: Vec<T> = (0..to_len).map(|at| element(at + 77_777)).collect();
    let expected = shape.model(&from, &before);
    let region = shape.region();
    let source = to_device(&transfer, from.clone(), &stream).unwrap().wait().unwrap();
    for way in 0..3 {
        let mut target = to_device(&transfer, before.clone(), &stream).unwrap().wait().unwrap();
        let mut back = before.clone();
        match way {
            0 => {
                drop(target.upload(region.of(from.clone()), &transfer).unwrap());
                back = source.download(region.of(back), &transfer).unwrap().wait().unwrap();
            }
            1 => {
                drop(target.upload(region.of(&from), &transfer).unwrap());
                let mut pinned = transfer.pinned().alloc_from(&before).unwrap();
                drop(source.download(region.of(&mut pinned), &transfer).unwrap());
                back.copy_from_slice(&pinned.read().unwrap());
            }
            _ => {
                let pinned = transfer.pinned().alloc_from(&from).unwrap();
                drop(target.upload(region.of(&pinned), &transfer).unwrap());
                back = source.download(region.of(back), &transfer).unwrap().wait().unwrap();
            }
        }
        assert!(back == expected, "way {way} to the host");
        let there = target.to_vec(&transfer).unwrap();
        assert!(there == expected, "way {way} to the device");
    }
    let stats = transfer.counters();
    let bytes = (3 * shape.places().len() * size_of::<T>()) as u64;
    assert!(stats.uploads.bytes >= bytes && stats.downloads.bytes >= bytes, "{stats:?}");
    assert_eq!(sim.take_violations(), []);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn each_element_is_copied_to_the_place_of_its_index(shape in shapes(), seed in 0..1000u64) {
        round_trips(&shape, seed, |at| u32::try_from(at).unwrap());
        // Of a size that chunks cut.
        round_trips(&shape, seed, |at| <[u8; 7]>::try_from(&content(7, at)[..]).unwrap());
    }
}

#[test]
fn an_empty_region_is_complete_at_once() {
    let (sim, transfer) = world(1);
    let stream = transfer.device().stream().unwrap();
    for shape in [
        Shape { extents: vec![0, 5], from: vec![5, 1], to: vec![5, 1] },
        Shape { extents: vec![5, 0], from: vec![9, 0], to: vec![9, 0] },
    ] {
        let mut target = to_device(&transfer, vec![3u8; 4], &stream).unwrap().wait().unwrap();
        let mut pinned = transfer.pinned().alloc_zeroed::<u8>(1).unwrap();
        let region = shape.region();
        assert!(target.upload(region.of(vec![1u8]), &transfer).unwrap().is_done().unwrap());
        assert!(target.upload(region.of(&pinned), &transfer).unwrap().is_done().unwrap());
        assert!(target.download(region.of(&mut pinned), &transfer).unwrap().is_done().unwrap());
        target.upload(region.of(&[1u8]), &transfer).unwrap().wait().unwrap();
        assert_eq!(target.download(region.of(vec![7]), &transfer).unwrap().wait().unwrap(), [7]);
        assert_eq!(target.to_vec(&transfer).unwrap(), [3; 4]);
    }
    // Elements without bytes, however many.
    let shape = Shape { extents: vec![1000, 1000], from: vec![1000, 1], to: vec![1000, 1] };
    let mut target = to_device(&transfer, vec![(); 1_000_000], &stream).unwrap().wait().unwrap();
    let mut pinned = transfer.pinned().alloc_zeroed::<()>(1_000_000).unwrap();
    target.upload(shape.region().of(&pinned), &transfer).unwrap().wait().unwrap();
    target.download(shape.region().of(&mut pinned), &transfer).unwrap().wait().unwrap();
    target.upload(shape.region().of(vec![(); 1_000_000]), &transfer).unwrap().wait().unwrap();
    let back = target.download(shape.region().of(vec![(); 1_000_000]), &transfer).unwrap().wait().unwrap();
    assert_eq!(back.len(), 1_000_000);
    assert_eq!(sim.take_violations(), []);
}

#[test]
fn regions_that_do_not_fit_are_refused_before_any_copy() {
    let (sim, transfer) = world(1);
    let (_, other) = world(2);
    let stream = transfer.device().stream().unwrap();
    let mut target = to_device(&transfer, vec![3u32; 1000], &stream).unwrap().wait().unwrap();
    let mut elsewhere = other.allocator().alloc::<u32>(1000, other.device().default_stream()).unwrap();
    let pinned = transfer.pinned().alloc_zeroed::<u32>(1000).unwrap();
    let (from, uploaded) = (vec![1u32; 1000], transfer.counters().uploads.copies);
    let long = Shape { extents: vec![1001], from: vec![1], to: vec![1] };
    let twice = Shape { extents: vec![10, 10], from: vec![10, 1], to: vec![9, 1] };
    let fits = Shape { extents: vec![1000], from: vec![1], to: vec![1] };
    for shape in [&long, &twice] {
        let region = shape.region();
        for refused in [
            target.upload(region.of(from.clone()), &transfer).err(),
            target.upload(region.of(&pinned), &transfer).err(),
            target.upload(region.of(&from), &transfer).err(),
            target.download(region.of(from.clone()), &transfer).err(),
        ] {
            let expected = |error: &Error| {
                matches!(
                    error,
                    Error::Request(RequestError::OutOfBounds { end: 1001, len: 1000, .. })
                        | Error::Transfer(TransferError::Region { .. })
                )
            };
            assert!(refused.as_ref().is_some_and(expected), "{refused:?}");
        }
    }
    let region = fits.region();
    for refused in [
        elsewhere.upload(region.of(from.clone()), &transfer).err(),
        elsewhere.upload(region.of(&pinned), &transfer).err(),
        elsewhere.upload(region.of(&from), &transfer).err(),
        elsewhere.download(region.of(from.clone()), &transfer).err(),
    ] {
        assert!(matches!(refused, Some(Error::Request(RequestError::WrongDevice { .. }))), "{refused:?}");
    }
    assert_eq!(transfer.counters().uploads.copies, uploaded);
    assert_eq!(sim.take_violations(), []);
}

/// Every second row of a matrix, to the device and back, through the ring.
fn rows() -> Shape {
    Shape { extents: vec![300, 1000], from: vec![2000, 1], to: vec![1500, 1] }
}

#[test]
fn every_driver_call_of_a_region_may_fail() {
    let shape = rows();
    let [from_len, to_len] = shape.reach();
    let from = content(from_len, 5);
    let expected = shape.model(&from, &vec![0; to_len]);
    let trip = |transfer: &Transfer| -> Result<(), Error> {
        let stream = transfer.device().stream()?;
        // After a failed upload the download reads all of it.
        let mut buffer = transfer.allocator().alloc_zeros::<u8>(to_len, &stream)?;
        let uploaded = buffer.upload(shape.region().of(from.clone()), &transfer)?;
        let there = Shape { from: shape.to.clone(), ..shape.clone() };
        let back = buffer.download(there.region().of(vec![0; to_len]), &transfer)?.wait()?;
        uploaded.wait()?;
        assert!(back == expected);
        Ok(())
    };
    for nth in 1.. {
        let (sim, transfer) = world(nth);
        sim.inject(Fault::Nth { operation: None, nth, code: Code(999) });
        let failed = trip(&transfer);
        let (made, _) = (sim.calls_made(), sim.clear_faults());
        assert!(!failed.as_ref().is_err_and(Error::is_device_lost), "call {nth}: {failed:?}");
        trip(&transfer).unwrap_or_else(|error| panic!("after a failure of call {nth}: {error}"));
        assert_eq!(sim.take_violations(), []);
        if nth > made {
            assert!(failed.is_ok());
            break;
        }
    }
}

fn end<T>(how: u64, pending: Pending<T>) {
    match how {
        0 => pending.cancel(),
        1 => drop(pending),
        _ => std::mem::forget(pending),
    }
}

#[test]
fn a_region_can_be_cancelled_dropped_and_forgotten() {
    let shape = Shape { extents: vec![2000, 1000], from: vec![2000, 1], to: vec![1001, 1] };
    let [from_len, to_len] = shape.reach();
    let there = Shape { from: shape.to.clone(), ..shape.clone() };
    for how in 0..3 {
        let (sim, transfer) = world(how);
        let stream = transfer.device().stream().unwrap();
        let mut buffer = to_device(&transfer, vec![0u8; to_len], &stream).unwrap().wait().unwrap();
        let mut back = transfer.pinned().alloc_zeroed::<u8>(to_len).unwrap();
        back.write().unwrap().fill(9);
        end(how, buffer.upload(shape.region().of(content(from_len, 1)), &transfer).unwrap());
        end(how, buffer.download(there.region().of(vec![9; to_len]), &transfer).unwrap());
        end(how, buffer.download(there.region().of(&mut back), &transfer).unwrap());
        // After any outcome the host and the device may use the memory at once, and bytes between
        // the elements are unchanged.
        let gaps = |bytes: &[u8], gap| bytes.chunks(1001).all(|row| row.get(1000).is_none_or(|&byte| byte == gap));
        assert!(gaps(&back.read().unwrap(), 9));
        let now = buffer.to_vec(&transfer).unwrap();
        assert!(gaps(&now, 0));
        if how > 0 {
            let expected = shape.model(&content(from_len, 1), &vec![0; to_len]);
            assert!(now == expected && back.read().unwrap() == there.model(&expected, &vec![9; to_len]));
        }
        drop((buffer, back, transfer));
        assert_eq!(sim.take_violations(), []);
    }
}
