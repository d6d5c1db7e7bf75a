//! Copies of regions between devices.
//!
//! Elements with gaps become dense where they are, cross as one piece, and are spread out where they arrive. What is repeated there crosses
//! once.

use aquifer_allocator::Buffer;
use bytemuck::Pod;

use crate::copy::{Region, Route};
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::pending::Pending;
use crate::runtime::Transfer;

/// The elements of a region as they cross.
#[derive(Debug, PartialEq, Eq)]
struct Crossing {
    /// Extents without repetitions.
    extents: Vec<usize>,
    /// Strides of the dense piece, without repetitions.
    dense: Vec<usize>,
    /// The same, 0 where elements are repeated.
    repeated: Vec<usize>,
    /// How many elements cross.
    count: usize,
}

impl Crossing {
    /// Of a region whose numbers were checked.
    fn of(region: &Region<'_>) -> Crossing {
        let is_repeated: Vec<bool> = region.from_strides.iter().map(|&stride| stride == 0).collect();
        let dimensions = region.extents.iter().zip(&is_repeated);
        let extents: Vec<usize> =
            dimensions.map(|(&extent, &is_repeated)| if is_repeated { 1 } else { extent }).collect();
        let mut dense = vec![0; extents.len()];
        let mut count = 1;
        for (stride, extent) in dense.iter_mut().zip(&extents).rev() {
            *stride = count;
            count *= extent;
        }
        let repeated = dense.iter().zip(&is_repeated);
        let repeated = repeated.map(|(&stride, &is_repeated)| if is_repeated { 0 } else { stride }).collect();
        Crossing { extents, dense, repeated, count }
    }

    /// Whether elements with these strides lie as they cross.
    fn lies_so(&self, strides: &[usize]) -> bool {
        let dimensions = self.extents.iter().zip(strides.iter().zip(&self.dense));
        dimensions.filter(|&(&extent, _)| extent > 1).all(|(_, (is, dense))| is == dense)
    }
}

impl Transfer {
    /// Enqueues copying a region from another device by the route, for a transfer that [`Transfer::count_from_peer`] counts.
    pub(super) fn region_from_peer<T: Pod + Send + Sync>(
        &self,
        from: &Buffer<T>,
        peer: &Transfer,
        to: &mut Buffer<T>,
        region: &Region<'_>,
        route: Route,
    ) -> Result<Pending<Route>, TransferError> {
        let there = peer.on(peer.next_stream(Direction::OnDevice))?;
        let here = self.on(self.next_stream(Direction::OnDevice))?;
        here.bring_region(from, &there, to, region, route)
    }

    /// Enqueues the parts of copying a region from another device, none of which is counted; see [`Transfer::count_from_peer`].
    fn bring_region<T: Pod + Send + Sync>(
        &self,
        from: &Buffer<T>,
        peer: &Transfer,
        to: &mut Buffer<T>,
        region: &Region<'_>,
        route: Route,
    ) -> Result<Pending<Route>, TransferError> {
        let crossing = Crossing::of(region);
        let count = host_vec::len_of(crossing.count as u64, size_of::<T>() as u64)?;
        let dense = peer.collected(from, region, &crossing, count)?;
        if crossing.dense == crossing.repeated && crossing.lies_so(region.to_strides) {
            let mut to = to.try_slice_mut(..count)?;
            return self.begin_from_peer(&dense, peer, &mut to, route);
        }
        let stream = self.next_stream(Direction::OnDevice);
        let mut arrived: Buffer<T> = self.allocator().alloc(count, stream)?;
        let copied = self.begin_from_peer(&dense, peer, &mut arrived, route)?;
        if !copied.is_enqueued() {
            // It may fail yet, and then there is nothing to spread out.
            copied.wait()?;
        }
        let spread = Region { from_strides: &crossing.repeated, ..*region };
        self.enqueue_copy(&arrived, to, Some(&spread))?;
        Ok(Pending::enqueued(self.shared(), self.covered_tick(stream), route))
    }

    /// The elements of a region without gaps or repetitions: where they lie, if they have none, else in new memory.
    fn collected<T: Copy>(
        &self,
        from: &Buffer<T>,
        region: &Region<'_>,
        crossing: &Crossing,
        count: usize,
    ) -> Result<Buffer<T>, TransferError> {
        if crossing.lies_so(region.from_strides) {
            return Ok(from.try_slice(..count)?.share());
        }
        let mut dense = self.allocator().alloc(count, self.next_stream(Direction::OnDevice))?;
        let region =
            Region { extents: &crossing.extents, from_strides: region.from_strides, to_strides: &crossing.dense };
        self.enqueue_copy(from, &mut dense, Some(&region))?;
        Ok(dense)
    }
}

#[cfg(test)]
mod tests {
    use aquifer_allocator::{Allocator, Config};
    use aquifer_device::sim::{SimConfig, SimDriver};
    use aquifer_device::{Device, RequestError};

    use super::*;

    #[test]
    fn what_is_repeated_crosses_once() {
        let region = Region { extents: &[5, 2, 3], from_strides: &[0, 7, 1], to_strides: &[6, 3, 1] };
        let crossing = Crossing::of(&region);
        assert_eq!((crossing.extents.as_slice(), crossing.count), (&[1, 2, 3][..], 6));
        assert_eq!((crossing.dense.as_slice(), crossing.repeated.as_slice()), (&[6, 3, 1][..], &[0, 3, 1][..]));
        assert!(!crossing.lies_so(region.from_strides) && crossing.lies_so(&[9, 3, 1]));
    }

    /// Every shape of region, on the way of each route: gaps on one side, on both, none, repeated elements, rows and single elements.
    #[test]
    fn regions_cross_between_devices_as_within_one() {
        let worlds = [0, 1].map(|ordinal| {
            let sim = SimDriver::new(SimConfig::default().ordinal(ordinal));
            let device = Device::new(sim.clone());
            let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
            (sim, transfer, device.stream().unwrap())
        });
        let [(_, one, stream), (_, two, elsewhere)] = &worlds;
        let from = one.to_device((0..1000u32).collect::<Vec<_>>(), stream).unwrap().wait().unwrap();
        let regions = [
            Region { extents: &[10, 10], from_strides: &[10, 1], to_strides: &[10, 1] },
            Region { extents: &[10, 10], from_strides: &[100, 1], to_strides: &[10, 1] },
            Region { extents: &[10, 10], from_strides: &[10, 1], to_strides: &[100, 1] },
            Region { extents: &[4, 5, 6], from_strides: &[200, 30, 2], to_strides: &[1, 8, 50] },
            Region { extents: &[7, 9], from_strides: &[0, 1], to_strides: &[9, 1] },
            Region { extents: &[7, 9], from_strides: &[3, 0], to_strides: &[1, 7] },
            Region { extents: &[], from_strides: &[], to_strides: &[] },
            Region { extents: &[3, 0], from_strides: &[1, 1], to_strides: &[1, 1] },
        ];
        for region in &regions {
            let [mut expected, mut crossed] = [(one, stream), (two, elsewhere)]
                .map(|(transfer, stream)| transfer.to_device(vec![7u32; 1000], stream).unwrap().wait().unwrap());
            one.copy(region.of(&from), &mut expected).unwrap().wait().unwrap();
            let counted = || [one, two].map(|transfer| transfer.counters().on_device);
            let [at_source, mut here] = counted();
            let route = two.copy(region.of(&from), &mut crossed).unwrap().wait().unwrap();
            assert_eq!(route, Route::Peer);
            // Where it was asked for, as one copy of its elements, whatever it is made of.
            let elements = region.extents.iter().product::<usize>() as u64;
            here.copies += elements.min(1);
            here.bytes += elements * 4;
            assert_eq!(counted(), [at_source, here], "{region:?}");
            let content = two.to_vec(&crossed).unwrap().wait().unwrap();
            assert_eq!(content, one.to_vec(&expected).unwrap().wait().unwrap(), "{region:?}");
        }
        let mut to = from.share();
        let beyond = Region { extents: &[11], from_strides: &[100], to_strides: &[1] };
        assert!(matches!(
            two.copy(beyond.of(&from), &mut to),
            Err(TransferError::Request(RequestError::WrongDevice { .. }))
        ));
        let mut to = two.allocator().alloc::<u32>(11, elsewhere).unwrap();
        let refused = two.copy(beyond.of(&from), &mut to);
        assert!(matches!(refused, Err(TransferError::Request(RequestError::OutOfBounds { .. }))), "{refused:?}");
        worlds.iter().for_each(|(sim, ..)| assert_eq!(sim.take_violations(), []));
    }
}
