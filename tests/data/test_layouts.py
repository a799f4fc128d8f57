"""The layouts of the field on small trees, as a folder, its parent and a tar; lists and archives that are damaged."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from idml.data.datasets import load_dataset
from idml.data.layouts import natural

SOP_HEADER = "image_id class_id super_class_id path\n"
INSHOP_HEADER = "image_name item_id evaluation_status\n"


def picture(grey):
    file = io.BytesIO()
    Image.new("L", (5, 4), grey).save(file, "PNG")
    return file.getvalue()


def write(root, files):
    """The files (text, bytes, or the grey of a picture) below a folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = picture(content) if isinstance(content, int) else content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture(params=["folder", "parent", "tar", "tar of the parent", "deep tar"])
def place(request, tmp_path):
    """A function that writes files in one of the ways a data set comes, and returns the path to give."""

    def put(files):
        root = write(tmp_path / "place" / "The Set", files)
        if "tar" not in request.param:
            return root if request.param == "folder" else root.parent
        inside = {"tar": ".", "tar of the parent": "The Set", "deep tar": "home/me/The Set"}[request.param]
        with tarfile.open(tmp_path / "set.tar", "w") as archive:
            archive.add(root, arcname=inside)
        return tmp_path / "set.tar"

    return put


def mat(**variables):
    file = io.BytesIO()
    savemat(file, variables)
    return file.getvalue()


def cells(values):
    array = np.empty((1, len(values)), dtype=object)
    array[0, :] = values
    return array


def annotations(column, rows):
    array = np.empty((1, len(rows)), dtype=[("bbox_x1", "O"), ("class", "O"), (column, "O")])
    for i, (name, number) in enumerate(rows):
        array[0, i] = (39, np.uint8(number), name)
    return array


def shown(images):
    """What a set holds: name, class and the grey that the picture really has."""
    return [
        (source.name, images.classes[label], source.decode().getpixel((0, 0))[0])
        for source, label in zip(images.sources, images.labels.tolist(), strict=True)
    ]


def one_line(error, *words):
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


CUB = {
    "classes.txt": "1 001.Auk\n2 002.Jay\n100 100.Owl\n101 101.Rail\n",
    "image_class_labels.txt": "1 1\n2 101\n3 2\n4 100\n5 1\n6 101\n",
    "images.txt": "1 001.Auk/a.jpg\n2 101.Rail/b.jpg\n3 002.Jay/c d.jpg\n4 100.Owl/é.jpg\n5 001.Auk/e.jpg\n"
    "6 101.Rail/f.jpg\n",
    "images/001.Auk/a.jpg": 10,
    "images/101.Rail/b.jpg": 20,
    "images/002.Jay/c d.jpg": 30,
    "images/100.Owl/é.jpg": 40,
    "images/001.Auk/e.jpg": 50,
    "images/101.Rail/f.jpg": 60,
}
CAR_NAMES = cells([f"Car {number}" for number in range(1, 197)])
CARS_ONE = {
    "cars_annos.mat": mat(
        annotations=annotations(
            "relative_im_path", [("car_ims/1.jpg", 99), ("car_ims/2.jpg", 98), ("car_ims/3.jpg", 1)]
        ),
        class_names=CAR_NAMES,
    ),
    "car_ims/1.jpg": 1,
    "car_ims/2.jpg": 2,
    "car_ims/3.jpg": 3,
}
TEST_LABELS = mat(annotations=annotations("fname", [("1.jpg", 196), ("2.jpg", 98)]))
CARS_TWO = {
    "devkit/cars_train_annos.mat": mat(annotations=annotations("fname", [("1.jpg", 98), ("2.jpg", 99), ("3.jpg", 4)])),
    "devkit/cars_meta.mat": mat(class_names=CAR_NAMES),
    "cars_test_annos_withlabels.mat": TEST_LABELS,
    "cars_train/1.jpg": 1,
    "cars_train/2.jpg": 2,
    "cars_train/3.jpg": 3,
    "cars_test/1.jpg": 4,
    "cars_test/2.jpg": 5,
}
SOP = {
    "Ebay_train.txt": f"{SOP_HEADER}1 1 1 bicycle_final/1_0.JPG\n2 1 1 bicycle_final/1_1.JPG\n"
    "3 2 1 sofa_final/2_0.JPG\n",
    "Ebay_test.txt": f"{SOP_HEADER}4 11319 1 sofa_final/3 0.JPG\r\n5 11320 1 sofa_final/4_0.JPG\r\n",
    "bicycle_final/1_0.JPG": 1,
    "bicycle_final/1_1.JPG": 2,
    "sofa_final/2_0.JPG": 3,
    "sofa_final/3 0.JPG": 4,
    "sofa_final/4_0.JPG": 5,
}
INSHOP_LIST = (
    f"6\n{INSHOP_HEADER}"
    "img/WOMEN/Tees/id_3/01.jpg       id_00000003 query\n"
    "img/WOMEN/Tees/id_1/01.jpg       id_00000001 train\n"
    "img/MEN/Denim/id_2/01.jpg        id_00000002 gallery\n"
    "img/MEN/Denim/id_2/02.jpg        id_00000002 query\n"
    "img/WOMEN/Tees/id_3/02.jpg       id_00000003 gallery\n"
    "img/WOMEN/Tees/id_1/02.jpg       id_00000001 train\n"
)
INSHOP_IMAGES = {line.split()[0]: grey for grey, line in enumerate(INSHOP_LIST.split("\n")[2:-1], start=1)}
INSHOP = {"list_eval_partition.txt": INSHOP_LIST, **INSHOP_IMAGES}


def test_cub(place):
    data = load_dataset(f"cub:{place(CUB)}")
    assert shown(data.train) == [
        ("images/001.Auk/a.jpg", "001.Auk", 10),
        ("images/002.Jay/c d.jpg", "002.Jay", 30),
        ("images/100.Owl/é.jpg", "100.Owl", 40),
        ("images/001.Auk/e.jpg", "001.Auk", 50),
    ]
    assert shown(data.test) == [("images/101.Rail/b.jpg", "101.Rail", 20), ("images/101.Rail/f.jpg", "101.Rail", 60)]
    assert data.train.labels.tolist() == [0, 1, 2, 0]
    assert data.notes == (
        "cub: 11,782 images missing (train 4 of 5,864, test 2 of 5,924)",
        "cub train: 2 classes of one image",
    )


def test_cars_in_one_folder(place):
    data = load_dataset(f"cars:{place(CARS_ONE)}")
    assert shown(data.train) == [("car_ims/2.jpg", "Car 98", 2), ("car_ims/3.jpg", "Car 1", 3)]
    assert shown(data.test) == [("car_ims/1.jpg", "Car 99", 1)]
    assert data.train.labels.tolist() == [1, 0]


@pytest.mark.parametrize("labels", ["cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat"])
def test_cars_in_two_folders(place, labels):
    files = {name: content for name, content in CARS_TWO.items() if content is not TEST_LABELS}
    data = load_dataset(f"cars:{place({**files, labels: TEST_LABELS})}")
    assert shown(data.train) == [
        ("cars_train/1.jpg", "Car 98", 1),
        ("cars_train/3.jpg", "Car 4", 3),
        ("cars_test/2.jpg", "Car 98", 5),
    ]
    assert shown(data.test) == [("cars_train/2.jpg", "Car 99", 2), ("cars_test/1.jpg", "Car 196", 4)]
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.gallery is None


def test_sop(place):
    data = load_dataset(f"sop:{place(SOP)}")
    assert shown(data.train) == [
        ("bicycle_final/1_0.JPG", "1", 1),
        ("bicycle_final/1_1.JPG", "1", 2),
        ("sofa_final/2_0.JPG", "2", 3),
    ]
    assert shown(data.test) == [("sofa_final/3 0.JPG", "11319", 4), ("sofa_final/4_0.JPG", "11320", 5)]
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.test.labels.tolist() == [0, 1]
    assert data.notes == (
        "sop: 120,048 images missing (train 3 of 59,551, test 2 of 60,502)",
        "sop train: 1 class of one image",
        "sop test: 2 classes of one image",
    )


@pytest.mark.parametrize("real", [False, True])
def test_inshop_numbers_queries_and_gallery_alike(place, real):
    unpacked = {f"Img/{name}": grey for name, grey in INSHOP_IMAGES.items()}
    files = {"Eval/list_eval_partition.txt": INSHOP_LIST, **unpacked} if real else INSHOP
    data = load_dataset(f"inshop:{place(files)}")
    one, two, three = "id_00000001", "id_00000002", "id_00000003"
    assert shown(data.train) == [("img/WOMEN/Tees/id_1/01.jpg", one, 2), ("img/WOMEN/Tees/id_1/02.jpg", one, 6)]
    assert shown(data.test) == [("img/WOMEN/Tees/id_3/01.jpg", three, 1), ("img/MEN/Denim/id_2/02.jpg", two, 4)]
    assert shown(data.gallery) == [("img/MEN/Denim/id_2/01.jpg", two, 3), ("img/WOMEN/Tees/id_3/02.jpg", three, 5)]
    assert data.test.classes == data.gallery.classes == (two, three)
    assert (data.test.labels.tolist(), data.gallery.labels.tolist()) == ([1, 0], [0, 1])
    assert data.notes == ("inshop: 52,706 images missing (train 2 of 25,882, test 2 of 14,218, gallery 2 of 12,612)",)


def test_inshop_query_without_a_counterpart_is_noted(tmp_path):
    files = {name: content for name, content in INSHOP.items() if "id_3/02" not in name}
    data = load_dataset(f"inshop:{write(tmp_path, files)}")
    assert data.gallery.classes == data.test.classes == ("id_00000002", "id_00000003")
    assert data.notes[-1] == "inshop test: 1 class with no image in the gallery"
    assert "1 listed but absent, 'img/WOMEN/Tees/id_3/02.jpg' first" in data.notes[0]


def test_inshop_items_of_the_gallery_alone_are_numbered_too(tmp_path):
    text = f"{INSHOP_LIST}img/x.jpg id_00000000 gallery\n"
    data = load_dataset(f"inshop:{write(tmp_path, {**INSHOP, 'list_eval_partition.txt': text, 'img/x.jpg': 7})}")
    assert data.test.classes == data.gallery.classes == ("id_00000000", "id_00000002", "id_00000003")
    assert (data.test.labels.tolist(), data.gallery.labels.tolist()) == ([2, 1], [1, 2, 0])


def test_inshop_images_mix_when_the_classes_are_split_anew(tmp_path):
    data = load_dataset(f"inshop:{write(tmp_path, INSHOP)}", split="0.4")
    assert data.train.classes == ("id_00000001",)
    assert data.test.classes == ("id_00000002", "id_00000003")
    assert len(data.test) == 4
    assert data.gallery is None


def test_a_linked_image_folder_is_read(tmp_path):
    files = {name: content for name, content in CARS_ONE.items() if name.endswith(".mat")}
    write(tmp_path / "other disk", {name: grey for name, grey in CARS_ONE.items() if name not in files})
    write(tmp_path / "cars", files)
    (tmp_path / "cars/car_ims").symlink_to(tmp_path / "other disk/car_ims", target_is_directory=True)
    data = load_dataset(f"cars:{tmp_path / 'cars'}")
    assert (len(data.train), len(data.test)) == (2, 1)


def test_a_listed_path_that_leaves_the_folder_counts_as_absent(tmp_path):
    write(tmp_path, {"secret.png": 9})
    text = f"{SOP_HEADER}1 1 1 a/1.JPG\n2 1 1 ../secret.png\n3 1 1 {tmp_path}/secret.png\n"
    write(tmp_path / "sop", {**SOP, "Ebay_train.txt": text, "a/1.JPG": 1})
    data = load_dataset(f"sop:{tmp_path / 'sop'}")
    assert shown(data.train) == [("a/1.JPG", "1", 1)]
    assert "2 listed but absent, '../secret.png' first" in data.notes[0]


@pytest.mark.parametrize(
    ("kind", "files", "file", "text", "words"),
    [
        ("cub", CUB, "images.txt", "1 001.Auk/a.jpg\n\n2\n", ("'images.txt'", "line 3", "image_id image_name")),
        ("cub", CUB, "images.txt", "1 a.jpg\n1 b.jpg\n", ("line 2", "'1' is there twice")),
        ("cub", CUB, "images.txt", "7 a.jpg\n", ("line 1", "'7' is not in image_class_labels.txt")),
        ("cub", CUB, "image_class_labels.txt", "1 1\n2 5\n", ("line 2", "class '5' is not in classes.txt")),
        ("cub", CUB, "classes.txt", "1 a\nx b\n", ("line 2", "class 'x' is not a number")),
        ("cub", CUB, "classes.txt", b"1 a\n2 \xff\n", ("'classes.txt'", "not UTF-8 at byte 6")),
        ("cub", CUB, "images.txt", "", ("11,788 images missing",)),
        ("sop", SOP, "Ebay_train.txt", "1 1 1 a.JPG\n", ("'Ebay_train.txt'", "line 1", "header")),
        ("sop", SOP, "Ebay_test.txt", f"{SOP_HEADER}1 1 1\n", ("'Ebay_test.txt'", "line 2", "got '1 1 1'")),
        ("sop", SOP, "Ebay_test.txt", f"{SOP_HEADER}1 x 1 a.JPG\n", ("line 2", "class 'x' is not a number")),
        ("sop", SOP, "Ebay_test.txt", "", ("line 1", "header")),
        ("inshop", INSHOP, "list_eval_partition.txt", "6\n", ("line 2", "header")),
        (
            "inshop",
            INSHOP,
            "list_eval_partition.txt",
            f"1\n{INSHOP_HEADER}a.jpg id_1 val\n",
            ("line 3", "'val'", "query"),
        ),
        ("cars", CARS_ONE, "cars_annos.mat", b"not a mat", ("'class_names'", "'cars_annos.mat'")),
        ("cars", CARS_ONE, "cars_annos.mat", CARS_ONE["cars_annos.mat"][:900], ("'cars_annos.mat'",)),
        ("cars", CARS_TWO, "devkit/cars_train_annos.mat", mat(other=1), ("'annotations'", "cars_train_annos.mat")),
        ("cars", CARS_TWO, "devkit/cars_train_annos.mat", mat(annotations=5), ("no 'fname' or no 'class'",)),
        (
            "cars",
            CARS_TWO,
            "cars_test_annos_withlabels.mat",
            mat(annotations=annotations("fname", [("1.jpg", 1), ("2.jpg", 197)])),
            ("annotation 2", "1 … 196"),
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_malformed_lists_are_refused_with_the_line(tmp_path, kind, files, file, text, words, packed):
    path = write(tmp_path / "set", {**files, file: text})
    if packed:
        with tarfile.open(tmp_path / "set.tar", "w") as archive:
            archive.add(path, arcname="set")
        path = tmp_path / "set.tar"
    with pytest.raises(ValueError, match=path.name) as error:
        load_dataset(f"{kind}:{path}")
    one_line(error, *words)


@pytest.mark.parametrize(
    ("kind", "files", "lost", "named"),
    [
        ("cub", CUB, "images.txt", "images.txt"),
        ("cub", CUB, "classes.txt", "classes.txt"),
        ("cub", CUB, "image_class_labels.txt", "image_class_labels.txt"),
        ("sop", SOP, "Ebay_train.txt", "Ebay_train.txt"),
        ("sop", SOP, "Ebay_test.txt", "Ebay_test.txt"),
        ("inshop", INSHOP, "list_eval_partition.txt", "list_eval_partition.txt"),
        ("cars", CARS_ONE, "cars_annos.mat", "cars_annos.mat"),
        ("cars", CARS_TWO, "devkit/cars_meta.mat", "cars_meta.mat"),
        ("cars", CARS_TWO, "cars_test_annos_withlabels.mat", "cars_test_annos_withlabels.mat"),
    ],
)
def test_lost_lists_are_named(place, kind, files, lost, named):
    path = place({name: content for name, content in files.items() if name != lost})
    with pytest.raises(FileNotFoundError) as error:
        load_dataset(f"{kind}:{path}")
    one_line(error, "there is no ", named)


def test_two_data_sets_below_a_path_are_not_guessed_between(tmp_path):
    write(tmp_path / "a", SOP)
    write(tmp_path / "b", SOP)
    write(tmp_path / ".old", SOP)
    with pytest.raises(ValueError, match="several data sets, name one: 'a/', 'b/'") as error:
        load_dataset(f"sop:{tmp_path}")
    one_line(error)
    write(tmp_path, SOP)
    assert len(load_dataset(f"sop:{tmp_path}").train) == 3


def test_no_listed_image_there(tmp_path):
    files = {name: content for name, content in SOP.items() if name.endswith(".txt")}
    with pytest.raises(ValueError, match="5 listed but absent, 'bicycle_final/1_0") as error:
        load_dataset(f"sop:{write(tmp_path, files)}")
    one_line(error, str(tmp_path))


def test_no_test_image_there(tmp_path):
    files = {name: content for name, content in SOP.items() if name not in ("sofa_final/3 0.JPG", "sofa_final/4_0.JPG")}
    with pytest.raises(ValueError, match="sop: there is no test image") as error:
        load_dataset(f"sop:{write(tmp_path, files)}")
    one_line(error, '"all"')
    assert len(load_dataset(f"sop:{tmp_path}", split="all").test) == 3


@pytest.fixture(params=[tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def packed(request, tmp_path):
    """A tar of 20 pictures in two classes, and where each header starts."""
    write(tmp_path / "pets", {f"{kind}/{i}.png": i for i in range(10) for kind in ("cat", "dog")})
    with tarfile.open(tmp_path / "pets.tar", "w", format=request.param) as archive:
        archive.add(tmp_path / "pets", arcname="pets")
    with tarfile.open(tmp_path / "pets.tar") as archive:
        return tmp_path / "pets.tar", [member.offset for member in archive]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_archives_are_refused(packed, pack):
    path, _ = packed
    path.write_bytes(pack(path.read_bytes()))
    with pytest.raises(ValueError, match="is compressed") as error:
        load_dataset(f"folder:{path}")
    one_line(error, str(path))


def test_truncated_archives_are_refused_wherever_they_end(packed):
    path, offsets = packed
    whole = path.read_bytes()
    for end in (0, 100, 512, offsets[5], offsets[5] + 100, offsets[5] + 512, offsets[5] + 600, offsets[-1] + 530):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="as a tar: ") as error:
            load_dataset(f"folder:{path}")
        one_line(error, str(path))


def test_damaged_headers_are_refused(packed):
    path, offsets = packed
    whole = bytearray(path.read_bytes())
    whole[offsets[5]] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=f"truncated or damaged at byte {offsets[5]:,}"):
        load_dataset(f"folder:{path}")
    path.write_bytes(b"text named .tar\n" * 100)
    with pytest.raises(ValueError, match="as a tar: "):
        load_dataset(f"folder:{path}")


def change_header(path, offset, start, new):
    """Other bytes in a member's header, with the checksum that fits."""
    whole = bytearray(path.read_bytes())
    header = whole[offset : offset + 512]
    header[start : start + len(new)] = new
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    whole[offset : offset + 512] = header
    path.write_bytes(whole)


def test_a_negative_size_does_not_send_the_reader_in_circles(packed):
    path, offsets = packed
    change_header(path, offsets[5], 124, b"\xff" * 10 + b"\xfe\x00")  # −512: back to this very header
    with pytest.raises(ValueError, match="as a tar: ") as error:
        load_dataset(f"folder:{path}")
    one_line(error, str(path))


def test_sparse_members_are_left_out(tmp_path):
    write(tmp_path / "pets", {"cat/1.png": 1, "dog/1.png": 2, "dog/2.png": 3})
    with tarfile.open(tmp_path / "pets.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
            archive.add(tmp_path / "pets" / name, arcname=name)
    with tarfile.open(tmp_path / "pets.tar") as archive:
        last = archive.getmember("dog/2.png").offset
    change_header(tmp_path / "pets.tar", last, 156, tarfile.GNUTYPE_SPARSE)
    data = load_dataset(f"folder:{tmp_path / 'pets.tar'}")
    assert shown(data.test) == [("dog/1.png", "dog", 2)]


def test_hard_links_in_an_archive_are_images(tmp_path):
    write(tmp_path / "pets", {"cat/1.png": 1, "dog/1.png": 2})
    (tmp_path / "pets/dog/2.png").hardlink_to(tmp_path / "pets/dog/1.png")
    with tarfile.open(tmp_path / "pets.tar", "w") as archive:
        archive.add(tmp_path / "pets", arcname="pets")
        assert archive.getmember("pets/dog/2.png").islnk() or archive.getmember("pets/dog/1.png").islnk()
    data = load_dataset(f"folder:{tmp_path / 'pets.tar'}")
    assert shown(data.test) == [("dog/1.png", "dog", 2), ("dog/2.png", "dog", 2)]


def test_an_archive_never_leaves_its_place(tmp_path):
    """Names with .. and absolute names, links to files outside: nothing is unpacked, nothing outside is read."""
    write(tmp_path, {"secret.png": 9, "made/cat/1.png": 1, "made/dog/1.png": 2})
    home = tmp_path / "home"
    home.mkdir()
    outside = str(tmp_path / "secret.png")
    with tarfile.open(home / "pets.tar", "w") as archive:
        archive.add(tmp_path / "made/cat/1.png", arcname="cat/1.png")
        archive.add(tmp_path / "made/dog/1.png", arcname="dog/1.png")
        for name in ("../secret.png", "../../dog/up.png", f"{tmp_path}/secret.png", "dog/../../secret.png"):
            evil = archive.gettarinfo(tmp_path / "made/dog/1.png")
            evil.name = name  # tarfile would remove the leading slash
            with (tmp_path / "made/dog/1.png").open("rb") as file:
                archive.addfile(evil, file)
        for number, (kind, target) in enumerate(
            [(tarfile.SYMTYPE, outside), (tarfile.SYMTYPE, "../secret.png"), (tarfile.LNKTYPE, "../made/cat/1.png")]
        ):
            link = tarfile.TarInfo(f"dog/link{number}.png")
            link.type, link.linkname = kind, target
            archive.addfile(link)
        device = tarfile.TarInfo("dog/device.png")
        device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 5
        archive.addfile(device)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    data = load_dataset(f"folder:{home / 'pets.tar'}", split="all")
    for source, label in zip(data.train.sources, data.train.labels.tolist(), strict=True):
        kind = "cat" if data.train.classes[label] == "cat" else "dog"
        original = Image.open(tmp_path / f"made/{kind}/1.png").convert("RGB")
        assert source.decode() == original  # what the archive holds, never the secret
    assert not any("link" in source.name or "device" in source.name for source in data.train.sources)
    assert {"cat/1.png", "dog/1.png"} <= {source.name for source in data.train.sources}
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_zip_archives_are_refused_unread(tmp_path):
    with zipfile.ZipFile(tmp_path / "pets.zip", "w") as archive:
        archive.writestr("../evil.png", b"x")
        archive.writestr("cat/1.png", b"x")
    with pytest.raises(ValueError, match=r"is compressed \(zip\)") as error:
        load_dataset(f"folder:{tmp_path / 'pets.zip'}")
    one_line(error, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["pets.zip"]


def test_natural_order():
    names = ["b", "a10", "a2", "a02", "a", "a2b1", "10", "9", "A1"]
    assert sorted(names, key=natural) == ["9", "10", "A1", "a", "a02", "a2", "a2b1", "a10", "b"]
    assert sorted(["a" + "9" * 5000, "a1"], key=natural)[0] == "a1"  # longer than int() reads
