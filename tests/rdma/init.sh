#!/bin/busybox sh
# First process of the virtual machine. On its command line: springtide.job=FILE (of the host) and springtide.links=N.
/bin/busybox --install -s /bin
export PATH=/bin

halt() {
    sync
    reboot -f
}
fail() {
    echo "rdma-vm: in the guest: $*" > /dev/ttyS1
    halt
}

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
stty -F /dev/ttyS1 raw -echo
for word in $(cat /proc/cmdline); do
    case $word in
        springtide.job=*) job=${word#*=} ;;
        springtide.links=*) links=${word#*=} ;;
    esac
done
while read -r module; do
    insmod "/modules/$module" || fail "cannot load $module"
done < /modules/order

# The host's files, below what was unpacked from packages, below what is written here and forgotten.
options=trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro
mount -t 9p -o $options host /host || fail "no files of the host"
mount -t 9p -o $options tools /tools || fail "no unpacked packages"
mount -t tmpfs tmpfs /written
mkdir /written/upper /written/work
mount -t overlay -o lowerdir=/tools:/host,upperdir=/written/upper,workdir=/written/work overlay /root || fail "no root"
for directory in proc sys dev; do
    mount --move /$directory /root/$directory
done
for directory in tmp run; do
    mount -t tmpfs tmpfs /root/$directory
done
cp "/host$job" /root/run/job || fail "no job"

cat > /root/run/setup <<'SETUP'
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
ip link set lo up
number=0
while [ $number -lt "$1" ]; do
    ip link add roce$number type dummy && ip link set roce$number mtu 9000 && ip addr add 10.99.$number.1/24 dev roce$number &&
        ip link set roce$number up && rdma link add rxe$number type rxe netdev roce$number || exit 1
    number=$((number + 1))
done
ulimit -l unlimited
ulimit -n 65536
exec /bin/sh /run/job
SETUP
chroot /root /bin/sh /run/setup "$links" < /root/dev/null > /root/dev/ttyS1 2>&1
printf '\036exit %d\n' $? > /root/dev/ttyS1
halt
