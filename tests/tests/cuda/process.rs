//! What concerns a whole process: no driver, an old one, a stub, no GPU, several. Each of these
//! tests runs itself in a process of its own, in an environment of its own.

use std::os::unix::fs::symlink;
use std::{env, fs};

use aquifer::Error;
use aquifer::device::{OpenError, cuda};
use aquifer::kernels::{KernelError, Kernels};
use aquifer_cuda::{Unavailable, gpus};
use aquifer_standin::{in_child, in_process};
use aquifer_tests::prelude::*;

use crate::support::standin;

/// Why no GPU can be used, which all functions say alike.
fn unavailable() -> Unavailable {
    let why = gpus().unwrap_err();
    let error = cuda::shared(0).unwrap_err();
    assert!(error.kind == ErrorKind::Unavailable, "{error}");
    assert_eq!(error.to_string(), format!("no GPU was opened: {why}"), "cuInit may not even have been found");
    assert!(
        matches!(aquifer::open("cuda:0"), Err(Error::Open(open)) if matches!(&*open, OpenError::Unavailable(same) if *same == why))
    );
    let best = aquifer::open_best().unwrap();
    assert_eq!(best.info().kind, "sim");
    assert!(best.chosen_because().is_some_and(|reason| reason.contains(&why.to_string())), "{best:?}");
    why
}

#[test]
fn without_a_driver_the_error_says_what_to_install() {
    in_process(&[], || match gpus() {
        Err(Unavailable::NoDriver { .. }) => {
            let said = unavailable().to_string();
            assert!(said.contains("libcuda.so.1") && said.contains("Install NVIDIA's display driver"), "{said}");
        }
        other => eprintln!("skipped: this machine has a driver: {other:?}"),
    });
}

#[test]
fn drivers_and_machines_without_a_usable_gpu_say_why() {
    let version = "AQUIFER_STANDIN_VERSION";
    let none = ("AQUIFER_STANDIN_DEVICES", "none");
    let hidden = |value: &str| Unavailable::Hidden { value: value.to_owned() };
    let symbol = "cuEventQuery";
    let cases = [
        (vec![(version, "11020")], Unavailable::TooOld { supported: (11, 2), needed: (11, 4) }),
        // It lacks required functions, too, and is not a broken driver.
        (vec![(version, "10020")], Unavailable::TooOld { supported: (10, 2), needed: (11, 4) }),
        (vec![("AQUIFER_STANDIN_WITHOUT", symbol)], Unavailable::MissingSymbol { symbol, version: Some((13, 0)) }),
        (vec![none], Unavailable::NoDevice),
        // A variable that shows the first GPU hides none where there is none.
        (vec![none, ("CUDA_VISIBLE_DEVICES", "0")], Unavailable::NoDevice),
        (vec![("CUDA_VISIBLE_DEVICES", "-1")], hidden("-1")),
        (vec![("CUDA_VISIBLE_DEVICES", "")], hidden("")),
    ];
    for (variables, expected) in cases {
        in_process(&variables, || {
            standin();
            let why = unavailable();
            assert_eq!(why, expected);
            if let Unavailable::Hidden { value } = &why {
                assert!(why.to_string().contains(&format!("CUDA_VISIBLE_DEVICES={value:?}")), "{why}");
            }
        });
    }
}

#[test]
fn the_oldest_driver_that_will_do_opens() {
    in_process(&[("AQUIFER_STANDIN_VERSION", "11040")], || {
        standin();
        let device = aquifer::open("cuda:0").unwrap();
        assert_eq!(device.info().driver_version, Some((11, 4)));
        assert_eq!(device.driver().attribute(aquifer_device::Attribute::BatchedCopies).unwrap(), 0);
        assert_eq!(device.driver().stream_id(device.stream().unwrap().raw()).unwrap(), None);
    });
}

/// Memory and copies are not held up by it.
#[test]
fn a_driver_that_is_too_old_for_the_kernels_is_named_with_what_they_need() {
    in_process(&[("AQUIFER_STANDIN_VERSION", "12010")], || {
        standin();
        let device = aquifer::open("cuda:0").unwrap();
        let refused = Kernels::load(&device).unwrap_err();
        assert!(matches!(refused, KernelError::DriverTooOld { supported: (12, 1), needs: (12, 2), .. }), "{refused}");
        let said = refused.to_string();
        assert!(said.contains("supports CUDA 12.1; the kernels need 12.2 or later"), "{said}");
    });
}

#[test]
fn the_oldest_driver_that_will_do_for_the_kernels_loads_them() {
    in_process(&[("AQUIFER_STANDIN_VERSION", "12020")], || {
        standin();
        Kernels::load(&aquifer::open("cuda:0").unwrap()).unwrap();
    });
}

#[test]
fn a_stub_is_distinguished_from_a_driver() {
    in_process(&[], || {
        let standin = standin();
        standin.fail("cuInit", 1, Code(34)).unwrap();
        assert_eq!(gpus(), Err(Unavailable::Stub));
        standin.fail("cuInit", 1, Code(803)).unwrap();
        let said = gpus().unwrap_err().to_string();
        assert!(said.contains("SYSTEM_DRIVER_MISMATCH") && said.contains("restart the machine"), "{said}");
        standin.fail("cuDriverGetVersion", 1, Code(999)).unwrap();
        assert_eq!(gpus(), Err(Unavailable::Failed { code: Code(999) }));
        standin.fail("cuDeviceGetCount", 1, Code(3)).unwrap();
        assert_eq!(gpus(), Err(Unavailable::Failed { code: Code(3) }));
        // Nothing of this is kept.
        assert_eq!(gpus().unwrap().len(), 1);
    });
}

#[test]
fn a_context_that_cannot_be_made_is_an_error_of_the_device() {
    in_process(&[], || {
        standin().fail("cuDevicePrimaryCtxRetain", 1, Code::OUT_OF_MEMORY).unwrap();
        let Err(Error::Device(error)) = aquifer::open("cuda:0") else { panic!("it was made") };
        assert!(error.is_out_of_memory() && error.to_string().contains("GPU 0"), "{error}");
        aquifer::open("cuda:0").unwrap();
    });
}

#[test]
fn gpus_are_found_by_ordinal_and_the_largest_is_the_best() {
    let variables = [("AQUIFER_STANDIN_DEVICES", "8GiB;rtx4090;16GiB"), ("CUDA_VISIBLE_DEVICES", "0,1,2")];
    in_process(&variables, || {
        standin();
        assert_eq!(gpus().unwrap().len(), 3);
        let found = gpus().unwrap();
        assert!(found.iter().all(|info| info.kind == cuda::KIND && info.compute_capability.0 >= 7));
        assert!(found.iter().map(|info| info.ordinal).eq(0..3));
        let device = aquifer::open("cuda:2").unwrap();
        assert_eq!((device.info().total_bytes, device.info().ordinal), (16 << 30, 2));
        assert_eq!((device.chosen_because(), aquifer::open("cuda:2").unwrap().id()), (None, device.id()));
        let best = aquifer::open_best().unwrap();
        let reason = best.chosen_because().unwrap();
        assert!(reason.contains("4090") && reason.contains("most memory of 3"), "{reason}");
        assert_eq!((best.info().ordinal, aquifer::open("cuda:1").unwrap().id()), (1, best.id()));
        let said = aquifer::open("cuda:7").unwrap_err().to_string();
        assert!(said.contains("no GPU 7") && said.contains("2 (") && said.contains("CUDA_VISIBLE_DEVICES"), "{said}");
    });
}

/// Under a name that nothing looks for.
#[test]
fn the_driver_is_the_library_that_the_environment_names() {
    if in_child() {
        return assert_eq!(gpus().unwrap().len(), 1);
    }
    let path = env::temp_dir().join(format!("aquifer-driver-{}.so", std::process::id()));
    symlink(standin().path(), &path).unwrap();
    in_process(&[("AQUIFER_CUDA_LIBRARY", path.to_str().unwrap())], || unreachable!("in the child alone"));
    fs::remove_file(path).unwrap();
}

#[test]
fn a_library_that_the_environment_names_and_that_is_not_there_is_an_error() {
    let variables = [("AQUIFER_CUDA_LIBRARY", "/nowhere/driver.so")];
    in_process(&variables, || {
        standin();
        let said = unavailable().to_string();
        assert!(said.contains("/nowhere/driver.so") && said.contains("was chosen"), "{said}");
    });
}

/// A driver as the system finds it: by name, on the library path.
#[test]
fn the_driver_is_found_on_the_library_path() {
    if in_child() {
        return assert_eq!(gpus().unwrap().len(), 1);
    }
    let folder = env::temp_dir().join(format!("aquifer-driver-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        let link = folder.join(name);
        symlink(standin().path(), &link).unwrap();
        in_process(&[("LD_LIBRARY_PATH", folder.to_str().unwrap())], || unreachable!("in the child alone"));
        fs::remove_file(link).unwrap();
    }
    fs::remove_dir(folder).unwrap();
}
