//! Errors as programs match them.

use aquifer::Error;
use aquifer::device::{DeviceError, RequestError};
use aquifer::kernels::KernelError;
use aquifer::memory::AllocError;
use aquifer::prelude::*;

fn requested<T>(result: Result<T, impl Into<Error>>) -> RequestError {
    let error = result.err().expect("the request is wrong").into();
    let Error::Request(inner) = &error else { panic!("{error:?}") };
    assert_eq!((error.request(), error.to_string()), (Some(inner), inner.to_string()));
    assert!(!error.is_out_of_memory() && !error.is_device_lost() && error.device().is_none());
    inner.clone()
}

#[test]
fn a_wrong_request_is_the_same_error_whichever_part_was_asked() -> Result<(), Error> {
    let (device, other) = (aquifer::open("sim:1GiB")?, aquifer::open("sim:1GiB")?);
    let (memory, stream, elsewhere) = (Allocator::of(&device)?, device.stream()?, other.stream()?);
    let mut x = memory.alloc_zeros::<f32>(4, &stream)?;
    let mut pinned = memory.pinned_from_slice(&[1.0_f32; 4])?;

    let wrong_device = [
        requested(memory.alloc::<u8>(1, &elsewhere)),
        requested(x.upload(vec![1.0; 4], &elsewhere)),
        requested(x.ready_on(&elsewhere)),
        requested(with(&elsewhere, [read(&x)], |_, _| Ok::<_, Error>(()))),
    ];
    for error in wrong_device {
        assert!(matches!(error, RequestError::WrongDevice { .. }), "{error}");
    }
    for error in [
        requested(x.try_slice(2..5)),
        requested(x.try_slice_mut(2..5)),
        requested(pinned.try_slice(2..5)),
        requested(pinned.try_slice_mut(2..5)),
    ] {
        assert_eq!(error.to_string(), "the range 2..5 is out of bounds for 4 elements");
    }
    for error in [requested(memory.alloc::<u64>(usize::MAX, &stream)), requested(memory.pinned::<u64>(usize::MAX))] {
        assert!(matches!(error, RequestError::LengthOverflow { size: 8, .. }), "{error}");
    }
    Ok(())
}

#[test]
fn a_lost_device_is_the_same_error_whichever_part_was_asked() -> Result<(), Error> {
    let device = aquifer::open("sim:1GiB,lost_at=100")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let (mut x, y) = (memory.alloc_zeros::<f32>(4, &stream)?, memory.alloc_zeros::<f32>(4, &stream)?);
    while device.synchronize().is_ok() {}
    let lost = [
        memory.alloc::<u8>(64 << 20, &stream).map(drop),
        memory.alloc::<u8>(4, &stream).map(drop),
        x.axpy(1.0, &y, &stream),
        x.upload(vec![1.0; 4], &stream).and_then(|upload| upload.wait()).map(drop),
    ];
    for error in lost.into_iter().map(Result::unwrap_err) {
        assert!(error.is_device_lost() && matches!(error, Error::Device(_)) && error.device().is_some(), "{error:?}");
    }
    Ok(())
}

#[test]
fn the_report_is_there_whichever_part_asked_for_memory() -> Result<(), Error> {
    let device = aquifer::open("sim:64MiB")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let x = memory.alloc_zeros::<u8>(48 << 20, &stream)?;
    let full = [memory.alloc::<u8>(48 << 20, &stream), x.cast::<u8>(&stream), x.to(&memory, &stream)];
    for error in full.into_iter().map(Result::unwrap_err) {
        assert!(error.is_out_of_memory() && matches!(error, Error::Alloc(_)) && error.report().is_some(), "{error:?}");
    }
    Ok(())
}

#[test]
fn errors_are_no_larger_than_those_of_the_driver_and_a_word() {
    let most = size_of::<DeviceError>() + size_of::<usize>();
    assert!(size_of::<RequestError>() <= size_of::<DeviceError>());
    assert!(size_of::<AllocError>() <= most);
    assert!(size_of::<Error>() <= size_of::<KernelError>() + size_of::<usize>());
}

/// `main` and `unwrap` show an error by its `Debug`.
#[test]
fn errors_are_shown_in_words_by_debug() -> Result<(), Error> {
    fn in_words(error: impl std::error::Error) -> String {
        let text = error.to_string();
        assert_eq!((format!("{error:?}"), format!("{error:#?}")), (text.clone(), text.clone()));
        text
    }
    let device = aquifer::open("sim:1GiB")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let _half = memory.alloc::<u8>(600 << 20, &stream)?;
    let refused = memory.alloc::<u8>(600 << 20, &stream).expect_err("too much");
    assert!(in_words(refused.clone()).contains("\n  try: "), "{refused}");
    assert!(in_words(refused.clone()).starts_with("out of memory. Tried to allocate"));
    assert!(refused.report().is_some());

    let (mut x, y) = (memory.alloc_zeros::<f32>(4, &stream)?, memory.alloc_zeros::<f32>(8, &stream)?);
    let mut errors = vec![
        in_words(aquifer::open("gpu").expect_err("no such device")),
        in_words(x.try_slice(2..9).expect_err("out of bounds")),
        in_words(x.upload(vec![1.0], &stream).expect_err("of another length")),
        in_words(x.add_assign(&y, &stream).expect_err("of another length")),
        in_words(memory.snapshot().save("x.txt").expect_err("no such format")),
        in_words(aquifer::memory::Config::parse("limit:3").expect_err("no such option")),
        in_words(aquifer::device::sim::SimConfig::parse("1GiB,x=3").expect_err("no such setting")),
        in_words(
            with(&stream, [write(&mut x)], |_, _| Err::<(), _>(y.item(&stream).expect_err("eight")))
                .expect_err("of the work"),
        ),
    ];
    errors.sort();
    errors.dedup();
    assert_eq!(errors.len(), 8);
    Ok(())
}
