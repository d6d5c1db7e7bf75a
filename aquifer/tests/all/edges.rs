//! Ends of the range of arguments: nothing, and more than there can be.

use aquifer::device::AccessKind;
use aquifer::memory::{AccessGuard, PoolOptions};
use aquifer::prelude::*;
use aquifer::transfer::Region;

#[test]
fn empty_buffers_take_every_verb() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let full = memory.from_slice(&[1.0_f32; 4], &stream)?;
    for mut x in [memory.alloc_zeros::<f32>(0, &stream)?, full.slice(4..).share(), memory.from_slice(&[], &stream)?] {
        x.fill(1.0, &stream)?;
        x.zero(&stream)?;
        x.upload(Vec::new(), &stream)?.wait()?;
        x.upload(&memory.pinned_from_slice::<f32>(&[])?, &stream)?.wait()?;
        x.axpy(2.0, &full.slice(..0), &stream)?;
        x.copy_from(&full.slice(2..2), &stream)?;
        assert_eq!((x.sum(&stream)?.item(&stream)?, x.to_vec(&stream)?), (0.0, Vec::new()));
        assert!(x.item(&stream).is_err() && x.cast::<u8>(&stream)?.is_empty());
        with(&stream, [write(&mut x)], |_, [x]| {
            assert_eq!(x.bytes(), 0);
            Ok::<_, aquifer::Error>(())
        })?;
    }
    assert_eq!(full.to_vec(&stream)?, [1.0; 4]);
    Ok(())
}

/// A view to write derefs to a buffer, which outlives the borrow then.
#[test]
fn the_buffer_of_a_view_that_is_swapped_keeps_its_memory() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let mut x = memory.from_slice(&[1.0_f32, 2.0, 3.0], &stream)?;
    let mut other = memory.from_slice(&[4.0_f32], &stream)?;
    std::mem::swap(&mut *x.slice_mut(1..), &mut other);
    drop(x);
    let another = memory.from_slice(&[9.0_f32; 3], &stream)?;
    assert_eq!((other.to_vec(&stream)?, another.item(&stream).is_err()), (vec![2.0, 3.0], true));
    drop(other);
    drop(another);
    assert_eq!(memory.memory_allocated(), 0);
    Ok(())
}

/// Work of a stream that records an event between the allocation and its first write.
#[test]
fn work_of_other_streams_comes_after_the_first_write_of_new_memory() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
    for len in [4, 1 << 20] {
        let x = memory.alloc_zeros::<f32>(len, &one)?;
        assert_eq!(x.slice(..4).to_vec(&two)?, [0.0; 4]);
        let storage = memory.alloc_storage(4 << 20, 512, &one)?;
        storage.write_first(&one, || {
            two.wait_for(&one.tick())?;
            Ok::<_, aquifer::Error>(one.fill(storage.ptr(), 7, 4 << 20)?)
        })?;
        assert_eq!(Buffer::<u8>::of(&storage).slice(..2).to_vec(&two)?, [7, 7]);
    }
    Ok(())
}

#[test]
fn lengths_that_no_machine_has_are_errors() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    assert!(memory.alloc::<u64>(usize::MAX, &stream).is_err());
    let extents = [usize::MAX, 3];
    let region = Region { extents: &extents, from_strides: &[1, 1], to_strides: &[3, 1] };
    let mut x = memory.from_slice(&[1_u8, 2], &stream)?;
    assert!(x.upload(region.of(&[1_u8, 2]), &stream).is_err());
    assert!(x.try_slice(1..3).is_err() && x.try_slice(..=usize::MAX).is_err());
    Ok(())
}

#[test]
fn tensors_go_to_what_names_memory() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let (memory, stream) = (Allocator::of_with(&device, "expandable_segments:True")?, device.stream()?);
    let host = Tensor::from_vec(vec![1.0_f32, 2.0], &[2])?;
    for there in [host.to(&memory)?, host.to((&memory, &stream))?, host.to(&device)?, host.to(&memory.transfer()?)?] {
        let there = there.wait()?;
        assert_eq!((there.place().to_string().as_str(), there.to_vec::<f32>()?), ("sim:0", vec![1.0, 2.0]));
    }
    let elsewhere = aquifer::open("sim:1GiB")?.stream()?;
    assert!(host.to((&memory, &elsewhere)).is_err());
    Ok(())
}

#[test]
fn each_handle_is_shown_on_one_short_line() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let mut x = memory.from_slice(&[1.0_f32; 4], &stream)?;
    let tensor = Tensor::from_buffer(&memory.from_slice(&[1.0_f32; 4], &stream)?, &[2, 2])?;
    let event = device.create_event(false)?;
    event.record(&stream)?;
    let graph = memory.graph(&stream, |stream| x.zero(stream))?;
    let pending = x.upload(vec![1.0; 4], &stream)?;
    let mut params = aquifer::tensor::ParamSet::new();
    params.insert("weight", tensor.clone())?;
    let capture = device.stream()?.begin_capture()?;
    let shown = [
        format!("{device:?}"),
        format!("{device}"),
        format!("{stream:?}"),
        format!("{:?}", stream.tick()),
        format!("{event:?}"),
        format!("{memory:?}"),
        format!("{:?}", memory.kernels()?),
        format!("{:?}", memory.transfer()?),
        format!("{:?}", memory.pinned::<f32>(4)?),
        format!("{:?}", memory.alloc_bytes(4, &stream)?),
        format!("{:?}", memory.growable(1 << 30, &stream)?),
        format!("{:?}", memory.create_pool(PoolOptions::default())?),
        format!("{:?}", memory.keep_awake()?),
        format!("{graph:?}"),
        format!("{capture:?}"),
        format!("{:?}", capture.end()?),
        format!("{params:?}"),
        format!("{pending:?}"),
        format!("{x:?}"),
        format!("{:?}", x.slice(1..)),
        format!("{:?}", x.slice_mut(1..)),
        format!("{:?}", x.storage()),
        format!("{:?}", read(&x)),
        format!("{:?}", AccessGuard::acquire(&stream, &[(x.storage(), AccessKind::Read)])?),
        format!("{tensor:?}"),
        format!("{tensor}"),
    ];
    for shown in shown {
        assert!(shown.len() < 120 && !shown.contains('\n'), "{}: {shown}", shown.len());
    }
    Ok(())
}
